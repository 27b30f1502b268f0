"""What the plugin costs a pytest run that does not use it: CPU time of a run with it and of one without, in turns.

python benchmarks/plain_run.py
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

RUNS = 20


def cpu_milliseconds(folder, *arguments):
    def used():
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return (usage.ru_utime + usage.ru_stime) * 1e3

    before = used()
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *arguments], cwd=folder, stdout=subprocess.DEVNULL, check=True
    )
    return used() - before


def main():
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pytest.ini").write_text("[pytest]\n")
        (Path(folder) / "test_plain.py").write_text("def test_plain(): pass\n")
        runs = [(cpu_milliseconds(folder), cpu_milliseconds(folder, "-p", "no:gpufleet")) for _ in range(RUNS)]
    with_it, without = (statistics.median(column) for column in zip(*runs, strict=True))
    print(f"with {with_it:.0f} ms, without {without:.0f} ms, difference {with_it - without:.0f} ms (median of {RUNS})")


if __name__ == "__main__":
    main()
