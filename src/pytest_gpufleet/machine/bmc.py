"""What the baseboard management controller (BMC) tells: its event log, power supplies, fans and temperatures.

By ipmitool, over the interface that the BMC has to its own host. Redfish would need the BMC's address and an account of
it, and is left out. What ipmitool prints for people is parsed: its `-c` quotes nothing, and has other columns for each
kind of sensor. `sdr type` and `sel elist` print the same in 1.8.18 and 1.8.19, but for dates (lib/ipmi_sel.c).
"""

import os
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from pytest_gpufleet.machine import tools
from pytest_gpufleet.machine.host_fact import HostFact
from pytest_gpufleet.machine.tools import AS_ROOT, Absent, RunTool, Unreadable, output


def read_firmware(root: Path = Path("/")) -> str:
    """Its version, as "24.9": the driver writes the part behind the point in hexadecimal
    (drivers/char/ipmi/ipmi_msghandler.c, firmware_revision_show). Absent where no driver has found one."""
    found = sorted((root / "sys/devices/platform").glob("ipmi_bmc.*/firmware_revision"))
    versions = [told for path in found if (told := tools.text(path))]
    if not versions:
        raise Absent(
            "no BMC answers the kernel of this system: load ipmi_si, or ask on the host of the VM or container"
        )
    return versions[0]


# Where ipmitool looks for the kernel's interface (src/plugins/open/open.c).
DEVICES = ("dev/ipmi0", "dev/ipmi/0", "dev/ipmidev/0")
# By part, the types of sensors as `ipmitool sdr type list` has them. Redundancy is of one or the other type.
SENSORS = {"power": ("Power Supply", "Power Unit"), "fans": ("Fan",), "temperatures": ("Temperature",)}
# ipmitool walks the whole log to its last entries, some milliseconds for each, and a log may have thousands.
NEWEST, LOG_SECONDS = 200, 60.0
# 1.8.18 writes four digits of the year, 1.8.19 as the locale does, which is C here.
DATES = ("%m/%d/%Y", "%m/%d/%y")


def read(root: Path = Path("/"), run: RunTool = output) -> dict[str, Any]:
    """`power`, `fans`, `temperatures`: of each sensor `name`, `entity` ("10.1": IPMI's kind of part and its number),
    `status` (ok, ns for one that tells nothing, else the threshold that is passed: lnc, lcr, lnr, unc, ucr, unr) and
    `reading` ("4680 RPM", or states: "Presence detected, Failure detected").

    `log`: `today` by the BMC's clock, whether it is `full`, and the newest `events`, oldest first: `id`, `at` as told,
    `day` (None where the BMC did not know the time), `sensor` with its type in front, `what`, `asserted`. None if it
    cannot be read, with `log_untold` saying why. Absent without a BMC, Unreadable without rights.
    """
    devices = [root / device for device in DEVICES if (root / device).exists()]
    if not devices:
        raise Absent("there is no /dev/ipmi0: a virtual machine has no BMC, and a server needs ipmi_devintf loaded")
    if not os.access(devices[0], os.R_OK | os.W_OK):
        raise Unreadable("only root may ask the BMC, by /dev/ipmi0", AS_ROOT)
    told: dict[str, Any] = {
        part: [sensor for kind in kinds for sensor in _sensors(run("ipmitool", "sdr", "type", kind))]
        for part, kinds in SENSORS.items()
    }
    try:
        return {**told, "log": _log(run), "log_untold": ""}
    except Unreadable as why:
        return {**told, "log": None, "log_untold": str(why)}


def _sensors(printed: str) -> list[dict[str, str]]:
    """Of lines like "PSU1 Status | E0h | ok | 10.1 | Presence detected"."""
    return [
        {"name": name, "entity": entity, "status": status, "reading": reading}
        for name, _, status, entity, reading in (row for row in _rows(printed, "|") if len(row) == 5)
    ]


def _rows(printed: str, between: str) -> list[list[str]]:
    return [[field.strip() for field in line.split(between)] for line in printed.splitlines()]


def _log(run: RunTool) -> dict[str, Any]:
    told = {row[0]: row[1] for row in _rows(run("ipmitool", "sel", "info"), ":") if len(row) == 2}
    full = told.get("Overflow") == "true" or told.get("Percent Used") == "100%"
    printed = run("ipmitool", "sel", "elist", "last", str(NEWEST), seconds=LOG_SECONDS)
    clock = run("ipmitool", "sel", "time", "get").split()
    return {"today": _day(clock[0]) if clock else None, "full": full, "events": _events(printed)}


def _events(printed: str) -> list[dict[str, Any]]:
    """Of lines like "7 | 09/08/2021 | 06:34:15 | Power Supply #0x3b | Failure detected | Asserted", behind which a
    reading may stand. Records of vendors have fewer columns and are left out."""
    return [
        {
            "id": row[0],
            "at": f"{row[1]} {row[2]}",
            "day": _day(row[1]),
            "sensor": row[3],
            "what": row[4],
            "asserted": row[5] == "Asserted",
        }
        for row in _rows(printed, "|")
        if len(row) >= 6 and row[5] in ("Asserted", "Deasserted")
    ]


def _day(told: str) -> str | None:
    """As ISO 8601 has it; None for "Pre-Init" and the like."""
    for form in DATES:
        with suppress(ValueError):
            return datetime.strptime(told, form).date().isoformat()
    return None


BMC_FIRMWARE = HostFact("bmc_firmware", str, read_firmware)
BMC = HostFact("bmc", dict[str, Any], read, subject="bmc", on_request=True)
