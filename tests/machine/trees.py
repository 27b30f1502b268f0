"""Recorded parts of /sys and /proc, and what programs of the system printed there.

A tree is a text file of trees/. What stands before the first "==" says where it comes from. "== proc/version" begins a
file, "== sys/firmware/dmi/entries/17-0/raw : hex" one whose bytes are written in hexadecimal,
"== sys/class/nvme/nvme0/device -> ../../0000:01:00.0" is a link, "== $ nvme list -o json" begins what a program
printed, and "== $ ipmitool sel list ! ipmitool failed: no device" is one that failed.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pytest_gpufleet.machine.tools import Unreadable

HEAD = re.compile(r"^== (.*)\n", re.MULTILINE)


@dataclass(frozen=True)
class Tree:
    """`root` stands for /. `run` stands for tools.output: Unreadable for programs of which nothing is recorded."""

    root: Path
    run: Callable[..., str]


def replaced(*pairs, times=-1):
    """A change of a tree: of each pair the one text instead of the other, which has to be there; only so often."""

    def change(text):
        for old, new in pairs:
            assert old in text
            text = text.replace(old, new, times)
        return text

    return change


def written(root, files):
    """Files under `root` by their names, each with its text or its bytes; a Path is what a link leads to."""
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, Path):
            path.symlink_to(content)
        else:
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def laid_out(name, root, change=str):
    """The recorded tree of this name as files under `root`; `change` is what its text is changed by before."""
    printed = {}
    failed = {}
    _, *parts = HEAD.split(change(((Path(__file__).parent / "trees") / f"{name}.txt").read_text()))
    for head, content in zip(parts[::2], parts[1::2], strict=True):
        if head.startswith("$ "):
            command, _, why = head[2:].partition(" ! ")
            (failed if why else printed)[command] = why or content
            continue
        path, _, target = head.partition(" -> ")
        path, in_hex, _ = path.partition(" : hex")
        written(root, {path: Path(target) if target else bytes.fromhex(content) if in_hex else content})

    def run(*command, seconds=20, statuses=(0,)):
        line = " ".join(command)
        if line not in printed:
            raise Unreadable(failed.get(line, f"{command[0]} is not installed"))
        return printed[line]

    return Tree(root, run)
