"""Stands in for the launcher while the sources lie in the workbench: the export puts its text here."""

from workbench.devices.launch import Launch, LaunchError, Parameter, Pointer, Program

__all__ = ["Launch", "LaunchError", "Parameter", "Pointer", "Program"]
