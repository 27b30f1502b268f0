"""What a run was asked for, and how its settings are read from text."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.language import LANGUAGES, Language
from pytest_gpufleet.model.levels import LEVELS

REHEARSAL_RANKS = 2
SHORTEST_DEADLINE_SECONDS = 60.0  # to start (10 s on 8 GPUs), and to end with a report (30 s)
LONGEST_INTERVAL_SECONDS = 10.0  # a slowdown that lasts for less can go unseen
LONGEST_KEY, LONGEST_NOTE = 40, 500  # characters of a note: the page that is signed has to hold some of them

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


Nodes = int | Literal["all"] | Path


def path(text: str) -> Path:
    """With home and variables filled in, as pytest reads where junit.xml and report.html are to be."""
    return Path(os.path.expanduser(os.path.expandvars(text)))


@contextmanager
def naming(option: str) -> Iterator[None]:
    """What refuses a file also says which option gave it."""
    try:
        yield
    except Refused as error:
        raise Refused(f"{option}: {error}") from None


def _reader(pattern: str, read: Callable[[str], Any], wrong: str) -> Callable[[str], Any]:
    """What reads a text that has this form, and says of any other what is wrong."""

    def read_text(text: str) -> Any:
        if not re.fullmatch(pattern, text):
            raise argparse.ArgumentTypeError(f"{text[:80]!r} {wrong}")
        return read(text)

    return read_text


def _one_of(what: str, names: Sequence[str], more: str = "") -> Callable[[str], Any]:
    return _reader("|".join(names), str, f"is not a {what}; choose from {', '.join(names)}{more}")


def _count_or_word(text: str) -> int | str:
    return int(text) if text.isdigit() else text


_COUNT = "0*[1-9][0-9]{0,8}"
whole_number = _reader(_COUNT, int, "is not a whole number, 1 or more")
rank_count = _reader(_COUNT, int, "is not a number of CPU ranks (1 or more), as in --rehearse=4")
share = _reader("[0-9]{1,6}|[0-9]{1,2}%|100%", str, "is no number of nodes, like 5, nor a share of them, like 10%")
index = _reader(f"0|{_COUNT}", int, "is not the number of a node, 0 or more")
gpu_count = _reader(
    f"all|auto|{_COUNT}", _count_or_word,
    "is not a number of GPUs (1 or more), all or auto; choose single GPUs by CUDA_VISIBLE_DEVICES=0,1",
)  # fmt: skip
dcgm_level = _reader("[234]", int, "is not a level of DCGM's diagnostic for hardware; choose from 2, 3, 4")
# "none", or the Gbit/s of a GPU as a number that is written in one way.
network = _reader(
    r"none|(?=.*[1-9])[0-9]{1,5}(\.[0-9]{1,3})?", lambda text: text if text == "none" else f"{float(text):g}",
    "is not the network rate of each GPU in Gbit/s, like 400, or none",
)  # fmt: skip
seconds = _reader(r"(?=.*[1-9])(\d+\.?\d*|\.\d+)", float, "is not a number of seconds above 0")
# Seconds of "90s", "15m", "2h" or "3d".
duration = _reader(
    f"{_COUNT}[smhd]", lambda text: int(text[:-1]) * {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}[text[-1]],
    "is not a duration: write a whole number and s, m, h or d, like 15m or 72h",
)  # fmt: skip


def nodes(text: str) -> Nodes:
    wrong = "is not a number of nodes nor all, and no file of hosts has this name"
    is_file = text != "all" and os.path.isfile(path(text))
    found: Nodes = path(text) if is_file else _reader(f"all|{_COUNT}", _count_or_word, wrong)(text)
    return found


def webhook(text: str) -> str:
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise argparse.ArgumentTypeError("not an http or https address")
    return text


def interval(text: str) -> float:
    value: float = seconds(text)
    if value > LONGEST_INTERVAL_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r} is more than {LONGEST_INTERVAL_SECONDS:g} seconds: a GPU that slows down would go unseen"
        )
    return value


def listed(text: str) -> tuple[str, ...]:
    return tuple(sorted({each.strip() for each in text.split(",")}))


def subjects(text: str) -> tuple[str, ...]:
    """Parts of the host by the names that facts have for them (HostFact.subject)."""
    from pytest_gpufleet.machine.host import SUBJECTS  # of which a plain pytest run loads nothing

    named = listed(text)
    if unknown := [each for each in named if each not in SUBJECTS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no subject of the host; choose from {', '.join(SUBJECTS)}")
    return named


def note(text: str) -> tuple[str, str]:
    """Key and value of "order=4711", without the blanks around them."""
    key, _, value = map(str.strip, text.partition("="))
    if not key or not value or len(key) > LONGEST_KEY or len(value) > LONGEST_NOTE or not key.isprintable():
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} is not a note: write KEY=VALUE, like order=4711, with a key of at most {LONGEST_KEY} "
            f"characters and a value of at most {LONGEST_NOTE}"
        )
    return key, value


def _grade(text: str) -> Any:
    from pytest_gpufleet.model.finding import GRADES  # with msgspec

    return _one_of("grade of limits", GRADES, ", the best first")(text)


@dataclass(frozen=True)
class Option:
    """An option of the command line. `read`: its value from a text; `metavar` None: it has none. `site`: an ini file
    can say the same, under the name of the option. `many`: several times, and in several lines."""

    flag: str
    read: Callable[[str], Any]
    metavar: str | None
    help: str
    site: bool = False
    many: bool = False

    @property
    def name(self) -> str:
        return self.flag.lstrip("-").replace("-", "_")


# ruff: noqa: RUF009 - it makes a field, as dataclasses.field does
def _option(default: Any, *option: Any, **how: Any) -> Any:
    return field(default=default, metadata={"option": Option(*option, **how)})


@dataclass(frozen=True)
class Options:
    """What was asked for, `gpus` and `rehearse` of each node; times in seconds. `paths`: of checks, and of what they
    are run and judged by. `asked`: it is to be a run of its own. `listing`: pytest only shows what there is."""

    # fmt: off
    gpus: int | Literal["all", "auto"] = _option("auto", "--gpus", gpu_count, "N|all|auto",
        "run on N GPUs, on all, or (auto) on all there are, and as a rehearsal if no NVIDIA hardware is detected. "
        "Fewer GPUs than N: the run goes on with those present and is rejected.", site=True)
    rehearse: int | None = _option(None, "--rehearse", rank_count, "N",
        f"use N CPU ranks with Gloo ({REHEARSAL_RANKS} without =N) instead of GPUs; never accepts a machine")
    nodes: Nodes | None = _option(None, "--nodes", nodes, "N|all|FILE",
        "run on N nodes, with --gpus of each, on which the same command is started (srun, mpirun, Indexed Job, "
        "--fleet-head), or on those of a Ray cluster; on all that a launcher or Ray has; or on the hosts of a file, a "
        "name a line, and its rack or leaf switch. With --rehearse and no launcher on N simulated on this machine. "
        "Another number than N: the run goes on and is rejected.", site=True)
    head: str | None = _option(None, "--fleet-head", str, "HOST:PORT",
        "where nodes connect, the same on every node, if no launcher says it: the node with this address is the head, "
        "and has the verdict")
    index: int | None = _option(None, "--fleet-index", index, "N",
        "the number of this node, 0 at the head, if neither launcher nor address says it")
    secret_file: Path | None = _option(None, "--fleet-secret-file", path, "FILE",
        "the secret of the run, at least 32 bytes, the same on every node (or in GPUFLEET_SECRET)", site=True)
    join: float = _option(120.0, "--fleet-join", duration, "DURATION", "wait for late nodes (default: 2m)", site=True)
    hung: float = _option(600.0, "--fleet-hung", duration, "DURATION",
        "how far a node's own run may fall behind others before the run goes on without it (default: 10m); five "
        "times their time, if that is more", site=True)
    only_failed: Path | None = _option(None, "--fleet-only-failed", path, "DIR",
        "repeat the nodes that failed in the run on many nodes in DIR, which the head reads, with two good ones; on "
        "the others the command ends")
    address: str | None = _option(None, "--fleet-address", str, "ADDRESS",
        "the Ray cluster (default: the one that Ray finds by itself); with --rehearse its nodes are rehearsed on")
    insecure: bool = _option(False, "--fleet-insecure", bool, None,
        "use a Ray cluster without token authentication, in which anyone who reaches a port can run commands")
    level: str = _option("standard", "--fleet-level", _one_of("level", LEVELS), f"{{{','.join(LEVELS)}}}",
        "how thorough: quick, standard (the default: the handover) or burnin", site=True)
    burn_in: float | None = _option(None, "--fleet-burn-in", duration, "DURATION",
        "how long the sustained load of level burnin lasts, like 15m (the default), 2h or 72h; implies that level")
    bound: float | None = _option(None, "--fleet-corruption-bound", duration, "DURATION",
        "burn in, beyond --fleet-burn-in if needed, until silent data corruption in matmuls is known to be rarer "
        "than once per DURATION and GPU, at 95 percent confidence; implies level burnin")
    profile: Path | None = _option(None, "--fleet-profile", path, "PATH",
        "limits from this TOML file, which may extend a shipped profile (default: the shipped ones for this GPU model)",
        site=True)
    order: Path | None = _option(None, "--fleet-order", path, "FILE",
        "what was bought, a TOML file that `gpufleet order` can write: each line is a check", site=True)
    requirements: Path | None = _option(None, "--fleet-requirements", path, "FILE",
        "requirements of a customer: a TOML file, or the shipped clustermax or nvidia-ai-cloud; a line that no check "
        "answers makes the verdict INCOMPLETE", site=True)
    basis: str = _option("physical", "--fleet-basis", _grade, "GRADE",
        "lowest accepted grade of limits: contract, calibrated, published, project or physical (the default); if a "
        "required measurement has a lower one, the verdict is INCOMPLETE", site=True)
    network: str = _option("", "--fleet-network", network, "none|GBIT",
        "port rate of each GPU in the network between nodes, Gbit/s one way (default: by the ports that are up); none: "
        "no limit, and no port has to be up", site=True)
    without: tuple[str, ...] = _option((), "--fleet-without", subjects, "SUBJECT,...",
        "subjects of the host not to judge, such as bmc,disks, which the verdict names", site=True)
    used: bool = _option(False, "--fleet-used", bool, None,
        "the hardware is not new: earlier remapped rows and memory errors are no fault")
    folder: Path = _option(Path("reports"), "--fleet-dir", path, "DIR",
        "where the folder of each run is made (default: reports)", site=True)
    keep: int | None = _option(None, "--fleet-keep", whole_number, "N",
        "after the run remove all but the N latest folders of this machine in --fleet-dir; signed ones stay, and the "
        "last that was ACCEPTED", site=True)
    disk_folder: Path | None = _option(None, "--fleet-disk-folder", path, "DIR",
        "a folder on the drive that level burnin tests: 1 GiB written, read and removed", site=True)
    dcgm: int = _option(2, "--fleet-dcgm", dcgm_level, "LEVEL",
        "level of NVIDIA's own diagnostic (`dcgmi diag -r`) at level burnin: 2 (the default), 3 or 4", site=True)
    timeout: float = _option(300.0, "--fleet-timeout", seconds, "SECONDS",
        "deadline of one call on the ranks (default: 300)", site=True)
    deadline: float | None = _option(None, "--fleet-deadline", duration, "DURATION",
        "when the whole run must be over, like 10m, with its report: checks not run by then are left out, and the "
        "verdict is INCOMPLETE", site=True)
    notes: tuple[tuple[str, str], ...] = _option((), "--fleet-note", note, "KEY=VALUE",
        "a note for the report's head and signatures: order, asset, location, technician, remarks or any other key; "
        "repeatable", site=True, many=True)
    alias: bool = _option(False, "--fleet-alias", bool, None,
        "write aliases instead of serial numbers, UUIDs, names of hosts and users and addresses into all files of the "
        "run, which can be published and still be verified, resumed and compared")
    language: Language = _option(
        "en", "--fleet-language", _one_of("language of the report", LANGUAGES), f"{{{','.join(LANGUAGES)}}}",
        "language of the report (default: en)", site=True)
    resume: Path | None = _option(None, "--fleet-resume", path, "DIR",
        "continue the run in DIR that died or was interrupted: checks that met their limits are not run again, except "
        "inventory and health")
    returns: Path | None = _option(None, "--fleet-returns", path, "DIR",
        "the machine of the run in DIR comes back from repair: failed checks run first, then level quick, then those "
        "of the replaced parts, and all other parts must be unchanged")
    replaced: tuple[str, ...] = _option((), "--fleet-replaced", listed, "PART,...",
        "of --fleet-returns: the parts replaced, such as gpu3,nic1 (gpuN, nicN, diskN, dimmN, board), and firmware if "
        "any was updated")
    interval: float = _option(1.0, "--fleet-interval", interval, "SECONDS",
        f"time between two samples of telemetry, {LONGEST_INTERVAL_SECONDS:g} at most (default: 1)", site=True)
    monitor: bool = _option(False, "--fleet-monitor", bool, None, "show GPUs, or nodes, below pytest's own output")
    prometheus: Path | None = _option(None, "--fleet-prometheus", path, "FILE",
        "write verdict and measurements to FILE for the textfile collector of node_exporter, which reads *.prom",
        site=True)
    webhook: str = _option("", "--fleet-webhook", webhook, "URL",
        "POST summary.json there when the run is over, up to four times; a bearer token in GPUFLEET_WEBHOOK_TOKEN. A "
        "failure changes no verdict.")
    # fmt: on
    paths: tuple[str, ...] = ()
    asked: bool = False
    listing: bool = False

    @property
    def makes_a_run(self) -> bool:
        """Whether there is a run with evidence, report and verdict."""
        return self.asked and not self.listing


# By the field of Options.
OPTIONS: dict[str, Option] = {each.name: each.metadata["option"] for each in fields(Options) if each.metadata}
