"""Which commit the suite is of, where it runs from a checkout."""

from __future__ import annotations

from pathlib import Path

from pytest_gpufleet.hardware.tools import RunTool, Untold, output

CHECKOUT = Path(__file__).parents[3]
SECONDS = 5


def of_checkout(root: Path = CHECKOUT, run: RunTool = output) -> str:
    """The commit that is checked out in `root`, with "-dirty" where tracked files differ from it; "" if this is no
    checkout, or git is not there to tell. Git is told which repository it is: so it goes by no GIT_DIR, and does not
    mind that somebody else owns a checkout which this user may only read."""
    git = root / ".git"
    if not git.exists():
        return ""
    quietly = ("--no-optional-locks", "-c", "core.fsmonitor=false")
    try:
        return run(
            "git", *quietly, f"--git-dir={git}", f"--work-tree={root}",
            "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*", seconds=SECONDS,
        ).strip()  # fmt: skip
    except Untold:
        return ""
