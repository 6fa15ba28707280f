"""Cost: machine descriptions, roofline, occupancy, and the latency model whose times are predictions."""

from workbench.cost.latency import LaunchPrediction, Prediction, Premises, predict
from workbench.cost.machine import Machine, load_machine, machine_for, machine_names
from workbench.cost.occupancy import Occupancy, occupancy
from workbench.cost.roofline import Roofline, roofline

__all__ = [
    "LaunchPrediction",
    "Machine",
    "Occupancy",
    "Prediction",
    "Premises",
    "Roofline",
    "load_machine",
    "machine_for",
    "machine_names",
    "occupancy",
    "predict",
    "roofline",
]
