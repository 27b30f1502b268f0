"""The settings of a run (run/settings) as pytest has them: of the command line, else of an ini file."""

import argparse
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import pytest

from pytest_gpufleet.model.conditions import CONDITIONS, RESNETS
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.plugin import compat
from pytest_gpufleet.redaction import clean
from pytest_gpufleet.run import settings
from pytest_gpufleet.run.settings import OPTIONS, Option, Options

# Of the ResNet checks of the acceptance suite, as addoption takes them.
_NUMBER = {"type": settings.whole_number, "metavar": "N"}
OF_RESNET: dict[str, dict[str, Any]] = {
    "--resnet-model": {"choices": RESNETS, "default": "resnet50", "help": "the network (default: resnet50)"},
    "--resnet-optimizer": {
        "choices": CONDITIONS["optimizer"].values, "default": "sgd", "help": "the optimizer (default: sgd)"
    },
    "--resnet-batch": {**_NUMBER, "help": "images a GPU and step (default: the recipe's, halved until they fit)"},
    "--resnet-steps": {**_NUMBER, "help": "steps of each sample (default: about a second)"},
    "--resnet-warm-up": {**_NUMBER, "help": "steps before the first sample (default: 8 to 30)"},
    "--resnet-workers": {
        **_NUMBER,
        "help": "loader processes a GPU (default: a core each, 16 at most, as far as their batches fit into /dev/shm)",
    },
}  # fmt: skip


SUITE = "pytest_gpufleet.acceptance"  # as a wheel has it
MAKES_A_RUN = ("gpus", "rehearse", "nodes")
# pytest's own, with which no test runs.
LISTINGS = (
    "collectonly", "showfixtures", "show_fixtures_per_test", "markers", "setupplan", "cacheshow", "help", "version",
)  # fmt: skip


def run_suite_by_package(config: pytest.Config) -> None:
    """The suite named by its package, as a wheel has it, is a run on all GPUs that are here, as `pytest acceptance/`
    is: there acceptance/conftest.py says so, which pytest reads too late where it is given a package."""
    says_nothing = all(config.getoption(name) is None for name in MAKES_A_RUN)
    of_a_site = config.getini("gpus") or config.getini("nodes")
    if says_nothing and not of_a_site and any(_of_suite(config, argument) for argument in config.args):
        config.option.gpus = "auto"


def path_of(config: pytest.Config, argument: str) -> Path:
    """The file or folder that an argument of pytest names."""
    name = argument.partition("::")[0]
    if not _of_suite(config, argument):
        return config.invocation_params.dir / name
    path = Path(__file__).parents[2].joinpath(*name.split("."))
    return path if path.is_dir() else path.with_suffix(".py")


def _of_suite(config: pytest.Config, argument: str) -> bool:
    """Whether it names the package of the suite, or a module of it."""
    return bool(config.option.pyargs) and f"{argument.partition('::')[0]}.".startswith(f"{SUITE}.")


EVERYDAY = (
    "gpus", "rehearse", "nodes", "level", "burn_in", "order", "profile", "folder", "language", "notes", "resume",
    "returns", "replaced",
)  # fmt: skip


def add(parser: pytest.Parser) -> None:
    everyday = parser.getgroup("gpufleet", "acceptance of GPU machines")
    rare = parser.getgroup("gpufleet-rare", "acceptance of GPU machines, rarely needed")
    for field, option in OPTIONS.items():
        group = everyday if field in EVERYDAY else rare
        if option.metavar is None:
            group.addoption(option.flag, action="store_const", const=True, help=option.help)
        else:
            how: dict[str, Any] = {"action": "append"} if option.many else {}
            group.addoption(option.flag, type=option.read, metavar=option.metavar, help=option.help, **how)
        if option.site:
            help = f"{option.flag} where the command line says nothing: {option.help}"
            kind: Literal["linelist", "string"] = "linelist" if option.many else "string"
            parser.addini(option.name, help, kind, default="")
    compat.takes_no_argument_alone(parser, "--rehearse", str(settings.REHEARSAL_RANKS))
    group = parser.getgroup("gpufleet-resnet", "what the ResNet checks of the acceptance suite do")
    for flag, how in OF_RESNET.items():
        group.addoption(flag, **how)


READ = pytest.StashKey[Options]()


def from_config(config: pytest.Config) -> Options:
    """What was asked for, read when it is needed first. UsageError for what does not go together."""
    if READ in config.stash:
        return config.stash[READ]
    given = {field: config.getoption(option.name) for field, option in OPTIONS.items()}
    _refuse(_contradictions(config, given))
    if given["burn_in"] or given["bound"]:
        given["level"] = "burnin"
    for field, option in OPTIONS.items():
        if field in MAKES_A_RUN and given["rehearse"]:
            continue  # a site's ini file says what its machines have
        if option.many:
            lines = [_read(config, option, line) for line in config.getini(option.name)]
            given[field] = tuple(lines + (given[field] or []))
        elif option.site and given[field] is None and (text := str(config.getini(option.name)).strip()):
            found = _read(config, option, text)
            beside = isinstance(found, Path) and config.inipath  # a path counts from the file's folder
            given[field] = beside.parent / found if beside else found
    asked = any(given[name] is not None for name in MAKES_A_RUN)
    if given["nodes"] is not None and not given["rehearse"] and given["gpus"] in (None, "auto"):
        given["gpus"] = "all"  # of many nodes: not chosen by each for itself
    known = {name: value for name, value in given.items() if value is not None}
    # Of the checks (none where pytest was given none and looks into the whole folder), and of what judges them.
    here = config.invocation_params.dir
    paths = [path for argument in config.args if here / (path := argument.partition("::")[0]) != here]
    files = (config.inipath, *map(known.get, ("profile", "order", "requirements")))
    paths += [str(file) for file in files if file is not None]
    listing = any(config.getoption(name, False) for name in LISTINGS)
    options = Options(**known, asked=asked, listing=listing, paths=tuple(dict.fromkeys(paths)))
    if options.makes_a_run:
        _refuse(_obstacles(options))
    config.stash[READ] = options
    return options


def _refuse(why: Iterable[str]) -> None:
    """UsageError for the first reason: later ones may need what an earlier one says is missing."""
    if words := next(filter(None, why), ""):
        raise pytest.UsageError(words)


def _contradictions(config: pytest.Config, given: Mapping[str, Any]) -> Iterator[str]:
    for before, argument in pairwise(config.invocation_params.args):
        if before == "--rehearse" and not argument.startswith("-") and not Path(argument.partition("::")[0]).exists():
            yield f"--rehearse {argument}: no path has this name, and a number of ranks is --rehearse=N"
    if config.option.pyargs and "pytest_gpufleet" in config.args:
        yield f"pytest_gpufleet has no checks, its suite has: pytest --pyargs {SUITE}"
    if given["gpus"] not in (None, "auto") and given["rehearse"]:
        yield "--gpus N and --gpus all run on GPUs, --rehearse on CPUs: give one of them"
    many = given["nodes"] is not None or (not given["rehearse"] and config.getini("nodes"))
    for name in ("address", "insecure", "head", "index", "only_failed"):
        if given[name] is not None and not many:
            yield f"{OPTIONS[name].flag} is about many nodes: say how many, --nodes N or --nodes all"
    if given["head"] is not None and given["address"] is not None:
        yield "--fleet-head is where nodes dial in, --fleet-address a Ray cluster that starts them: give one of them"
    if given["returns"] is None and given["replaced"]:
        yield "--fleet-replaced is about a machine that comes back: give the run before with --fleet-returns DIR"
    burning = [OPTIONS[name].flag for name in ("burn_in", "bound") if given[name]]
    if given["returns"] is not None and (given["level"] or burning):
        yield f"--fleet-returns has the level of the run before: leave out {' and '.join(burning or ['--fleet-level'])}"
    if burning and given["level"] not in (None, "burnin"):
        yield f"{burning[0]} is part of level burnin, but --fleet-level {given['level']} was given"


def _obstacles(options: Options) -> Iterator[str]:
    """Why a run could not do what it was asked for: known now, and not when all is measured."""
    if sys.flags.optimize:
        yield "python -O and PYTHONOPTIMIZE leave out assertions, so no check could fail: unset it"
    yield settings.lacking()
    if options.returns is not None and options.nodes is not None:
        yield "--fleet-returns is about one machine: start it there without --nodes"
    if options.nodes is not None and find_spec("zmq") is None:
        yield f"--nodes needs pyzmq: {sys.executable} -m pip install 'pytest-gpufleet[nodes]'"
    from pytest_gpufleet.model.events import ONE_OF_MANY
    from pytest_gpufleet.nodes.launchers import starts_several

    if launcher := starts_several(os.environ):
        yield (
            f"{launcher} starts pytest several times, and each would take the same GPUs: start it once a node with "
            "--gpus, or once with --nodes; it starts a process for each GPU itself"
        )
    # Half an hour later that would be a check that does not apply. In a run on many nodes it is just that: not all of
    # them need to have what one has. A site's ini file names it for all levels, of which one uses it.
    tests_a_drive = options.disk_folder is not None and options.level == "burnin" and options.nodes is None
    if tests_a_drive and ONE_OF_MANY not in os.environ and not os.path.isdir(str(options.disk_folder)):
        yield f"--fleet-disk-folder: {options.disk_folder} is no folder: make it, or name another"
    if (deadline := options.deadline) is not None and deadline < (least := settings.SHORTEST_DEADLINE_SECONDS):
        yield f"--fleet-deadline {deadline:g}s is too short to start and to write a report: give {least:g}s or more"


def _read(config: pytest.Config, option: Option, text: str) -> Any:
    try:
        return option.read(text)
    except argparse.ArgumentTypeError as error:
        raise pytest.UsageError(f"{option.name} in {config.inipath}: {error}") from None


@contextmanager
def refusals() -> Iterator[None]:
    """What a run refuses is an error of usage for pytest. What others wrote cannot steer the terminal by it."""
    try:
        yield
    except Refused as error:
        raise pytest.UsageError(clean(str(error))) from None
