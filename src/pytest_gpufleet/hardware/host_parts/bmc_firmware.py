"""The firmware of the management controller of the board (BMC), as the kernel's IPMI driver has it."""

from __future__ import annotations

from pathlib import Path

from pytest_gpufleet.hardware import sysfs
from pytest_gpufleet.hardware.tools import Untold


def read(root: Path = Path("/")) -> str:
    """Its version, as "24.9": the driver writes the part behind the point in hexadecimal
    (drivers/char/ipmi/ipmi_msghandler.c, firmware_revision_show). Untold where no driver has found one."""
    found = sorted((root / "sys/devices/platform").glob("ipmi_bmc.*/firmware_revision"))
    versions = [told for path in found if (told := sysfs.text(path))]
    if not versions:
        raise Untold(
            "no BMC answers the kernel of this system: load ipmi_si, or ask on the host of the VM or container"
        )
    return versions[0]
