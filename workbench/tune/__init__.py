"""Tuning: search spaces, samplers, studies, and replay of brute-forced spaces.

Optuna is imported on first use.
"""

from workbench.tune.points import Points
from workbench.tune.replay import ReplayReport, ReplaySpace, load_space, replay
from workbench.tune.samplers import SAMPLERS, Observation, RandomSampler, Sampler, TpeSampler, make_sampler
from workbench.tune.study import ABANDONED, State, Study, StudyIdentity, Trial
from workbench.tune.warm import earlier_winners

__all__ = [
    "ABANDONED",
    "SAMPLERS",
    "Observation",
    "Points",
    "RandomSampler",
    "ReplayReport",
    "ReplaySpace",
    "Sampler",
    "State",
    "Study",
    "StudyIdentity",
    "TpeSampler",
    "Trial",
    "earlier_winners",
    "load_space",
    "make_sampler",
    "replay",
]
