"""What vendors ask for when hardware goes back to them, as their own programs tell it."""

from __future__ import annotations

import gzip
import tempfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pytest_gpufleet import safe_files
from pytest_gpufleet.hardware.tools import Ended, Run, Untold, ended, output

BUG_REPORT_SECONDS = 600  # NVIDIA says minutes; with a driver that hangs it never ends
FABRIC_SECONDS = 300
MOST_BYTES = 256 << 20  # of a report, unpacked
ANY_STATUS = tuple(range(256))
ERROR = "-E-"  # as ibdiagnet begins a line that tells of an error


def bug_report(run: Ended = ended) -> str:
    """What nvidia-bug-report.sh collects of driver, kernel log and GPUs. Untold if it is not there, needs root, or did
    not come to its end."""
    with tempfile.TemporaryDirectory() as folder:
        status, out, errors = run(
            "nvidia-bug-report.sh", "--output-file", f"{folder}/nvidia-bug-report.log", seconds=BUG_REPORT_SECONDS
        )  # fmt: skip
        written = sorted(Path(folder).glob("nvidia-bug-report.log*"))
        if not written:
            said = [line for line in (errors or out).splitlines() if line.strip()]
            last = f": {said[-1].strip()}" if said else ""
            raise Untold(f"nvidia-bug-report.sh ended with status {status} and wrote nothing{last}")
        return _text(written[0])


def _text(path: Path) -> str:
    try:
        with safe_files.open_regular(path, MOST_BYTES) as file:
            opened = gzip.GzipFile(fileobj=file) if path.suffix == ".gz" else file
            data = opened.read(MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise Untold(f"{path.name} cannot be read: {error}") from None
    if len(data) > MOST_BYTES:
        raise Untold(f"{path.name} has more than {MOST_BYTES >> 20} MiB")
    return data.decode(errors="replace")


def fabric_errors(ports: Iterable[Mapping[str, Any]], run: Run = output) -> str:
    """The errors that ibdiagnet finds in the InfiniBand fabric, a line each. Untold without InfiniBand `ports`, without
    ibdiagnet, or if it did not come to its end."""
    if not any(port.get("link_layer") == "InfiniBand" for port in ports):
        raise Untold("the host has no InfiniBand port")
    with tempfile.TemporaryDirectory() as folder:
        said = run("ibdiagnet", "-o", folder, seconds=FABRIC_SECONDS, statuses=ANY_STATUS)
    if not said.strip():
        raise Untold("ibdiagnet printed nothing")
    return "".join(f"{line}\n" for line in said.splitlines() if line.lstrip().startswith(ERROR)) or "no error\n"
