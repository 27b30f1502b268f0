"""The command line, read into something checked."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from pytest_gpufleet.model.levels import LEVELS

ENGINES = ("local",)
REHEARSAL_RANKS = 2
DEFAULT_TIMEOUT_SECONDS = 300.0
DEFAULT_INTERVAL_SECONDS = 1.0
LONGEST_INTERVAL_SECONDS = 10.0  # a slowdown that lasts for less can go unseen
DURATIONS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

Gpus = int | Literal["all", "auto"]


@dataclass(frozen=True)
class Options:
    """What was asked for. `asked`: an option of ours was given. `listing`: pytest only shows what there is."""

    gpus: Gpus = "auto"
    rehearse: int | None = None
    level: str = "standard"
    profile: Path | None = None
    folder: Path = Path("reports")
    timeout: float = DEFAULT_TIMEOUT_SECONDS
    resume: Path | None = None
    interval: float = DEFAULT_INTERVAL_SECONDS
    monitor: bool = False
    prometheus: Path | None = None
    burn_in: float | None = None  # seconds
    asked: bool = False
    listing: bool = False

    @property
    def makes_a_run(self) -> bool:
        """Whether there is a run with evidence, report and verdict."""
        return self.asked and not self.listing


def add(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpufleet", "acceptance of machines full of GPUs")
    group.addoption(
        "--gpus", type=gpu_count, metavar="N|all|auto",
        help="run on N GPUs, on all, or (auto, the default) on all there are, and as a rehearsal on CPU ranks where "
        "nothing speaks for NVIDIA hardware. "
        "Fewer GPUs than N: the run goes on with those present and is rejected.",
    )  # fmt: skip
    group.addoption(
        "--rehearse", type=rank_count, nargs="?", const=REHEARSAL_RANKS, metavar="N",
        help=f"use N CPU ranks with Gloo (default: {REHEARSAL_RANKS}) instead of GPUs; never accepts a machine",
    )  # fmt: skip
    group.addoption(
        "--fleet-level",
        choices=LEVELS,
        help="how thorough: quick, standard (the default: the handover) or burnin",
    )
    group.addoption(
        "--fleet-burn-in", type=duration, metavar="DURATION",
        help="how long the sustained load of level burnin lasts, like 15m (the default), 2h or 72h; implies that level",
    )  # fmt: skip
    group.addoption(
        "--fleet-profile", type=Path, metavar="PATH",
        help="limits from this TOML file, which may extend a shipped profile (default: the shipped ones for this GPU "
        "model)",
    )  # fmt: skip
    group.addoption(
        "--fleet-dir",
        type=Path,
        metavar="DIR",
        help="where the folder of each run is made (default: reports)",
    )
    group.addoption(
        "--fleet-engine",
        choices=ENGINES,
        help="how ranks are run: local (the default), one process a GPU on this machine",
    )
    group.addoption(
        "--fleet-timeout", type=seconds, metavar="SECONDS",
        help=f"deadline of one call on the ranks (default: {DEFAULT_TIMEOUT_SECONDS:g})",
    )  # fmt: skip
    group.addoption(
        "--fleet-resume", type=Path, metavar="DIR",
        help="go on where the run whose folder this is died or was interrupted: checks that met their limits there are "
        "not run again, but for inventory and health",
    )  # fmt: skip
    group.addoption(
        "--fleet-interval", type=interval, metavar="SECONDS",
        help=f"time between two samples of telemetry, {LONGEST_INTERVAL_SECONDS:g} at most "
        f"(default: {DEFAULT_INTERVAL_SECONDS:g})",
    )  # fmt: skip
    group.addoption(
        "--fleet-monitor", action="store_const", const=True, help="show what the GPUs do below pytest's own output"
    )
    group.addoption(
        "--fleet-prometheus", type=Path, metavar="FILE",
        help="write verdict and figures to FILE for the textfile collector of node_exporter, which reads *.prom",
    )  # fmt: skip


FLEET_OPTIONS = (
    "gpus", "rehearse", "fleet_level", "fleet_profile", "fleet_dir", "fleet_engine", "fleet_timeout", "fleet_resume",
    "fleet_interval", "fleet_monitor", "fleet_prometheus", "fleet_burn_in",
)  # fmt: skip

# pytest's own, with which no test runs.
LISTINGS = (
    "collectonly", "showfixtures", "show_fixtures_per_test", "markers", "setupplan", "cacheshow", "help", "version",
)  # fmt: skip


def from_config(config: pytest.Config) -> Options:
    given = {name: config.getoption(name) for name in FLEET_OPTIONS}
    if given["gpus"] not in (None, "auto") and given["rehearse"]:
        raise pytest.UsageError("--gpus N and --gpus all run on GPUs, --rehearse on CPUs: give one of them")
    if given["fleet_burn_in"] and given["fleet_level"] not in (None, "burnin"):
        raise pytest.UsageError(
            f"--fleet-burn-in is part of level burnin, but --fleet-level {given['fleet_level']} was given"
        )
    asked = any(value is not None for value in given.values())
    listing = any(config.getoption(name, False) for name in LISTINGS)
    if asked and not listing and sys.flags.optimize:
        raise pytest.UsageError("python -O and PYTHONOPTIMIZE leave out assertions, so no check could fail: unset it")
    return Options(
        gpus=given["gpus"] or "auto",
        rehearse=given["rehearse"],
        level=given["fleet_level"] or ("burnin" if given["fleet_burn_in"] else "standard"),
        profile=given["fleet_profile"],
        folder=given["fleet_dir"] or Path("reports"),
        timeout=given["fleet_timeout"] or DEFAULT_TIMEOUT_SECONDS,
        resume=given["fleet_resume"],
        interval=given["fleet_interval"] or DEFAULT_INTERVAL_SECONDS,
        monitor=bool(given["fleet_monitor"]),
        prometheus=given["fleet_prometheus"],
        burn_in=given["fleet_burn_in"],
        asked=asked,
        listing=listing,
    )


def gpu_count(text: str) -> Gpus:
    if text == "all":
        return "all"
    if text == "auto":
        return "auto"
    return _at_least_one(text, "a number of GPUs (1 or more), all or auto")


def rank_count(text: str) -> int:
    return _at_least_one(text, "a number of CPU ranks (1 or more): write --rehearse=N, or put --rehearse last")


def seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return value


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


def _at_least_one(text: str, wanted: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
    return int(text)
