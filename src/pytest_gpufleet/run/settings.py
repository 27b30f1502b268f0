"""What a run was asked for, and how its settings are read from text."""

import argparse
import os
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from pytest_gpufleet.model.language import Language

REHEARSAL_RANKS = 2
SHORTEST_DEADLINE_SECONDS = 60.0  # to start (10 s on 8 GPUs), and to end with a report (30 s)
LONGEST_INTERVAL_SECONDS = 10.0  # a slowdown that lasts for less can go unseen
LONGEST_KEY, LONGEST_NOTE = 40, 500  # characters of a note: the page that is signed has to hold some of them
DURATIONS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

# What a run has to have, by the name that Python imports and the one that pip installs.
NEEDS = {
    "torch": "torch", "torchvision": "torchvision", "pynvml": "nvidia-ml-py",
    "cloudpickle": "cloudpickle", "msgspec": "msgspec", "jinja2": "jinja2", "matplotlib": "matplotlib", "rich": "rich",
    "prometheus_client": "prometheus-client", "tomli_w": "tomli-w",
    **({} if sys.version_info >= (3, 11) else {"tomli": "tomli"}),
}  # fmt: skip


def lacking() -> str:
    """What is not installed of this, and how to install it; "" if nothing lacks."""
    lacks = " ".join(name for module, name in NEEDS.items() if find_spec(module) is None)
    return lacks and f"pytest-gpufleet needs {lacks.replace(' ', ', ')}: {sys.executable} -m pip install {lacks}"


Gpus = int | Literal["all", "auto"]
Nodes = int | Literal["all"]


@dataclass(frozen=True)
class Options:
    """What was asked for, `gpus` and `rehearse` of each of the `nodes`. `asked`: it is to be a run of its own.
    `listing`: pytest only shows what there is."""

    gpus: Gpus = "auto"
    rehearse: int | None = None
    nodes: Nodes | None = None
    address: str | None = None
    insecure: bool = False
    paths: tuple[str, ...] = ()  # of the checks, and of what they are run and judged by
    level: str = "standard"
    profile: Path | None = None
    order: Path | None = None
    folder: Path = Path("reports")
    keep: int | None = None  # how many folders of runs, if not all
    timeout: float = 300.0  # seconds, as all times here
    resume: Path | None = None
    interval: float = 1.0
    monitor: bool = False
    prometheus: Path | None = None
    burn_in: float | None = None
    deadline: float | None = None
    basis: str = "physical"
    network: str = ""  # between nodes: Gbit/s that each GPU has of it, or none
    disk_folder: Path | None = None  # where drives are written to and read
    notes: tuple[tuple[str, str], ...] = ()  # key and value; of one key the last counts
    language: Language = "en"  # of the report
    dcgm: int = 2  # the level of DCGM's diagnostic
    alias: bool = False  # serial numbers, UUIDs and names are replaced in all that is written
    asked: bool = False
    listing: bool = False

    @property
    def makes_a_run(self) -> bool:
        """Whether there is a run with evidence, report and verdict."""
        return self.asked and not self.listing


def path(text: str) -> Path:
    """With the home and the variables that stand in it, as pytest reads where junit.xml and report.html are to be: else
    these would be in another folder than the evidence."""
    return Path(os.path.expanduser(os.path.expandvars(text)))


def gpu_count(text: str) -> Gpus:
    if text == "all":
        return "all"
    if text == "auto":
        return "auto"
    return _at_least_one(text, "a number of GPUs (1 or more), all or auto")


def node_count(text: str) -> Nodes:
    return "all" if text == "all" else _at_least_one(text, "a number of nodes (1 or more) or all")


def rank_count(text: str) -> int:
    return _at_least_one(text, "a number of CPU ranks (1 or more), as in --rehearse=4")


def dcgm_level(text: str) -> int:
    if text not in ("2", "3", "4"):
        raise argparse.ArgumentTypeError(f"{text!r} is no level of DCGM's diagnostic for hardware: 2, 3 and 4 are")
    return int(text)


def whole_number(text: str) -> int:
    return _at_least_one(text, "a whole number, 1 or more")


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


def network(text: str) -> str:
    """ "none", or the Gbit/s of a GPU as a number that is written in one way."""
    if text == "none":
        return text
    if not re.fullmatch(r"[0-9]{1,5}(\.[0-9]{1,3})?", text) or not float(text):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the Gbit/s of the network that each GPU has, such as 400, nor none"
        )
    return f"{float(text):g}"


def interval(text: str) -> float:
    value = seconds(text)
    if value > LONGEST_INTERVAL_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is more than {LONGEST_INTERVAL_SECONDS:g} seconds: a GPU that slows down would go unseen"
        )
    return value


def duration(text: str) -> float:
    """Seconds of "90s", "15m", "2h" or "3d"."""
    number, unit = text[:-1], text[-1:]
    if unit not in DURATIONS or not number.isascii() or not number.isdigit() or int(number) < 1:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no duration: write a whole number and s, m, h or d, like 15m or 72h"
        )
    return float(int(number) * DURATIONS[unit])


def note(text: str) -> tuple[str, str]:
    """Key and value of "order=4711", without the blanks around them."""
    key, _, value = map(str.strip, text.partition("="))
    if not key or not value or len(key) > LONGEST_KEY or len(value) > LONGEST_NOTE or not key.isprintable():
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} is no note: write KEY=VALUE, like order=4711, with a key of at most {LONGEST_KEY} "
            f"characters and a value of at most {LONGEST_NOTE}"
        )
    return key, value


def _at_least_one(text: str, wanted: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return int(text)
