"""The figures of a benchmark beside those of another commit, both measured in turns.

    python benchmarks/against.py d69f8ee plain_run              the working tree against the last commit of version 0.2
    python benchmarks/against.py HEAD calls --ranks 2           what the working tree changes
    python benchmarks/against.py --turns 15 v0.3.0 many_hosts 16

The benchmark is that of the working tree, its arguments are its own. It measures the package of both, each time in a
process of its own, one after the other: before, now; now, before; ... It is said where the other commit lacks what the
benchmark asks for. Prints a Markdown table: minimum, median and maximum of both, the ratio of the medians, and the
lowest and the highest ratio of a turn. A change is called higher or lower only where every turn says so: of 7 turns
without any change that is so once in 64.
"""

from __future__ import annotations

import argparse
import compileall
import io
import json
import math
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent
ROOT = HERE.parent
FOLDERS = ("src", "acceptance")  # a suite knows the package that it stands beside
TURNS = 7
# A benchmark that can be held against another commit has figures(arguments): one sample of each figure, by its name.
SAMPLE = """
import importlib, json, sys
name, file, *arguments = sys.argv[1:]
figures = importlib.import_module(name).figures(arguments)
with open(file, "w") as out:
    json.dump(figures, out)
"""


def copied(folder: Path) -> Path:
    """The package of the working tree as it is now, whatever is edited meanwhile."""
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", folder)
    return compiled(folder)


def archived(commit: str, folder: Path) -> Path:
    """The package of a commit."""
    command = ["git", "-C", str(ROOT), "archive", commit, *FOLDERS, "pyproject.toml"]
    archive = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(archive)) as files:
        files.extractall(folder)
    return compiled(folder)


def compiled(tree: Path) -> Path:
    """Both are compiled before they are measured: with PYTHONDONTWRITEBYTECODE one that is not would never be."""
    compileall.compile_dir(tree / "src", quiet=2)
    return tree


def environment(tree: Path, folder: Path) -> dict[str, str]:
    """In which Python finds the package of `tree`, and pytest its plugin: ahead of an installed one."""
    project = tomllib.loads((tree / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    about = folder / "pytest_gpufleet-0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: pytest-gpufleet\nVersion: 0\n")
    plugins = (f"{name} = {module}\n" for name, module in project["entry-points"]["pytest11"].items())
    (about / "entry_points.txt").write_text("[pytest11]\n" + "".join(plugins))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, tree / "src", HERE)))}


def sample(benchmark: str, arguments: Sequence[str], variables: Mapping[str, str]) -> dict[str, float]:
    """Figures by name. SystemExit if the package lacks what the benchmark asks for, with the end of what it said."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        command = [sys.executable, "-c", SAMPLE, benchmark, str(file), *arguments]
        done = subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(
                f"{benchmark} does not run with {variables['PYTHONPATH'].split(os.pathsep)[1]}:\n{done.stderr[-1000:]}"
            )
        figures: dict[str, float] = json.loads(file.read_text())
    return figures


def row(name: str, before: Sequence[float], now: Sequence[float]) -> str:
    """A line of the table."""
    turns = sorted(a / b if b else math.nan for a, b in zip(now, before, strict=True))
    agreed = "higher" if turns[0] > 1 else "lower" if turns[-1] < 1 else ""
    ranges = (" / ".join(f"{each:,.4g}" for each in (min(of), median(of), max(of))) for of in (before, now))
    ratio = f"{median(now) / median(before):.3f}" if median(before) else ""
    return f"| {name} | {' | '.join(ranges)} | {ratio} | {turns[0]:.3f} to {turns[-1]:.3f} | {agreed} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("commit")
    parser.add_argument("benchmark", help="its name, as plain_run")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the benchmark")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        before = environment(archived(asked.commit, folder / "before"), folder / "about before")
        now = environment(copied(folder / "now"), folder / "about now")
        taken = []
        for turn in range(asked.turns):
            order = (before, now) if turn % 2 == 0 else (now, before)
            figures = [sample(asked.benchmark, asked.arguments, each) for each in order]
            taken.append(figures if turn % 2 == 0 else figures[::-1])
            print(f"{turn + 1} of {asked.turns}", file=sys.stderr, flush=True)
    what = f"{asked.benchmark}, minimum / median / maximum of {asked.turns}"
    print(f"| {what} | {asked.commit} | now | ratio | turns | all say |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    for name in taken[0][1]:
        print(row(name, *([each[name] for each in column] for column in zip(*taken, strict=True))))


if __name__ == "__main__":
    main()
