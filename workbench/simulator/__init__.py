"""Executes PTX on the CPU: all lanes of a grid that stand at one instruction are one NumPy operation.

`run_ptx` runs a kernel of a PTX text on NumPy arrays. `Memory` holds buffers, `simulate` runs an artifact on
them, `simulate_module` any launches, `simulate_ranks` those of several ranks; each returns an `Outcome` with
findings and counters. docs/simulator.md shows their use.
"""

from workbench.simulator.adversary import Adversary, Pick, Starved, Torn, Unit
from workbench.simulator.counters import Counters
from workbench.simulator.launch import SimulationOptions
from workbench.simulator.memory import Memory
from workbench.simulator.program import UnsupportedInstruction
from workbench.simulator.ranks import Domain, RankLaunch, Schedule, simulate_ranks
from workbench.simulator.run import Unwritten, run_ptx
from workbench.simulator.simulate import KernelLaunch, Outcome, simulate, simulate_module
from workbench.simulator.trace import Trace

__all__ = [
    "Adversary",
    "Counters",
    "Domain",
    "KernelLaunch",
    "Memory",
    "Outcome",
    "Pick",
    "RankLaunch",
    "Schedule",
    "SimulationOptions",
    "Starved",
    "Torn",
    "Trace",
    "Unit",
    "UnsupportedInstruction",
    "Unwritten",
    "run_ptx",
    "simulate",
    "simulate_module",
    "simulate_ranks",
]
