"""Executes PTX on the CPU: all lanes of a grid that stand at one instruction are one NumPy operation.

`Memory` holds the buffers, `simulate` runs an artifact on them and returns an `Outcome` with findings and
counters.
"""

from workbench.simulator.counters import Counters
from workbench.simulator.launch import SimulationOptions
from workbench.simulator.memory import Memory
from workbench.simulator.program import UnsupportedInstruction
from workbench.simulator.ranks import Domain, RankLaunch, Schedule, simulate_ranks
from workbench.simulator.simulate import KernelLaunch, Outcome, simulate, simulate_module

__all__ = [
    "Counters",
    "Domain",
    "KernelLaunch",
    "Memory",
    "Outcome",
    "RankLaunch",
    "Schedule",
    "SimulationOptions",
    "UnsupportedInstruction",
    "simulate",
    "simulate_module",
    "simulate_ranks",
]
