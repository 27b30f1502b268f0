"""What NVIDIA's own diagnostic says of the GPUs: `dcgmi diag` of the Data Center GPU Manager (DCGM)."""

import json
from typing import Any

from pytest_gpufleet.machine.tools import Ended, Unreadable, ended

# By the level of `dcgmi diag -r`. NVIDIA's manual says 2, 30 and 60 to 120 minutes for them (DCGM User Guide, "Run
# Levels and Tests"); what goes on for twice as long, or for 15 minutes, hangs.
SECONDS = {2: 900.0, 3: 3600.0, 4: 14400.0}
# dcgmi ends with what its library returned, as an unsigned byte (DCGM, dcgmlib/dcgm_structs.h).
NO_HOST_ENGINE = 256 - 21  # DCGM_ST_CONNECTION_NOT_VALID


def read(level: int, run: Ended = ended) -> dict[str, Any]:
    """`level`, the exit `status` of dcgmi, and what it printed: the JSON `document`; None if it is none, and then
    `said`, its last line. It works on all GPUs of this machine, which nothing else should use meanwhile. Unreadable
    without dcgmi and without its host engine, NoAnswer if it did not come to an end."""
    status, out, errors = run("dcgmi", "diag", "-r", str(level), "-j", seconds=SECONDS[level])
    if status == NO_HOST_ENGINE:
        raise Unreadable("the host engine of DCGM does not answer", "systemctl start nvidia-dcgm")
    try:
        document, said = json.loads(out), ""
    except (ValueError, RecursionError):
        document, said = None, next(iter((errors or out).strip().splitlines()[-1:]), "")
    return {"level": level, "status": status, "document": document, "said": said}
