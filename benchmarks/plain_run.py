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


def figures(arguments):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "pytest.ini").write_text("[pytest]\n")
        (Path(folder) / "test_plain.py").write_text("def test_plain(): pass\n")
        with_it, without = cpu_milliseconds(folder), cpu_milliseconds(folder, "-p", "no:gpufleet")
    return {"with, ms": with_it, "without, ms": without, "difference, ms": with_it - without}


def main():
    runs = [figures([]) for _ in range(RUNS)]
    medians = (f"{name} {statistics.median(each[name] for each in runs):.0f}" for name in runs[0])
    print(f"{'; '.join(medians)} (median of {RUNS})")


if __name__ == "__main__":
    main()
