"""Checks on a GPU what the workbench says without one. `make gpu-check`; docs/gpu-check.md.

`build` runs on a CPU with the whole workbench and writes a folder that stands alone: cubins, inputs, what the
simulator makes of them, contracts, and the few modules that the run needs. `run` takes such a folder to an
sm_90a machine, where neither the compiler nor the workbench's other dependencies are.
"""
