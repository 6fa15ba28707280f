"""What is run on the device, section by section. Each yields records, which the report gathers."""

from workbench.devices.model import DeviceError


class NotHereError(DeviceError):
    """This machine cannot run the section: nothing is wrong, and nothing is claimed."""
