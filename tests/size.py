"""Lines and modules of each room, and whether the whole keeps within its bounds: `python tests/size.py`."""

import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES, TESTS, DOCS = ROOT / "src" / "pytest_gpufleet", ROOT / "tests", ROOT / "docs"
# What serves runs on many hosts.
HOSTS = re.compile("nodes/|verdict/fleet/|run/(cluster_run|node_runs)|plugin/on_nodes|report/hosts|commands/fleet")
GENERATED = {DOCS / "checks.md", DOCS / "planted-faults.md", DOCS / "power.md"}

# What there may be at most, blank lines included. Who adds, removes.
BOUNDS = {
    "lines of src": 34_000,
    "modules of src": 225,
    "lines about many hosts": 4_300,
    "lines of tests": 31_000,
    "words of docs": 28_000,
}


def rooms(folder: Path) -> dict[str, list[int]]:
    """The lines of each Python file, by the folder directly below this one that it is in."""
    found = defaultdict(list)
    for path in sorted(folder.rglob("*.py")):
        room = path.relative_to(folder).parts[0] if path.parent != folder else "."
        found[room].append(len(path.read_text(encoding="utf-8").splitlines()))
    return found


def main() -> int:
    sizes = {}
    for folder in (SOURCES, TESTS):
        found = rooms(folder)
        for room, files in sorted(found.items(), key=lambda each: -sum(each[1])):
            print(f"{folder.name + '/' + room:<28}{sum(files):>7,} lines {len(files):>4} modules")
        name = "src" if folder == SOURCES else "tests"
        sizes |= {
            f"lines of {name}": sum(map(sum, found.values())),
            f"modules of {name}": sum(map(len, found.values())),
        }
    hosts = (path for path in SOURCES.rglob("*.py") if HOSTS.match(path.relative_to(SOURCES).as_posix()))
    sizes["lines about many hosts"] = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in hosts)
    pages = {*DOCS.rglob("*.md"), *ROOT.glob("README*.md")} - GENERATED  # what is written by hand
    sizes["words of docs"] = sum(len(page.read_text(encoding="utf-8").split()) for page in pages)
    for name, size in sizes.items():
        print(f"{name:<28}{size:>7,}" + (f" of {BOUNDS[name]:,}" if name in BOUNDS else ""))
    above = [name for name, most in BOUNDS.items() if sizes[name] > most]
    print(f"above their bounds: {', '.join(above) or 'none'}")
    return bool(above)


if __name__ == "__main__":
    sys.exit(main())
