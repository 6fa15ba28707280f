"""Kernels of the instruction families and of the experiment on programmatic dependent launch."""
