"""With which arguments pytest runs on each node of a run on many: those of this run, but for what is about all of them
and for what has been done by then."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePath

import pytest

from pytest_gpufleet.run.settings import Options

# What is about the run of all nodes, where files of this machine go, and which tests are run: these are told by name.
WITH_A_VALUE = (
    "--nodes", "--gpus", "--fleet-address", "--fleet-dir", "--fleet-keep", "--fleet-deadline", "--fleet-resume",
    "--fleet-prometheus",
    "--html", "--junitxml", "--junit-xml", "--rootdir", "-c", "--config-file", "-k", "-m", "--deselect", "--ignore",
    "--ignore-glob", "--maxfail", "--basetemp", "--pastebin", "--log-file", "--debug", "--report-log",
)  # fmt: skip
WITHOUT = (
    "--fleet-insecure", "--fleet-monitor", "-x", "--exitfirst", "--lf", "--last-failed", "--ff", "--failed-first",
    "--nf", "--new-first", "--sw", "--stepwise", "--sw-skip", "--stepwise-skip", "--sw-reset", "--stepwise-reset",
    "--pyargs", "--pdb", "--trace", "--rehearse",
)  # fmt: skip


def arguments(config: pytest.Config, options: Options, items: Sequence[pytest.Item]) -> tuple[str, ...]:
    """`items`: the tests of one machine, in their order."""
    given = [*shlex.split(os.environ.get("PYTEST_ADDOPTS", "")), *config.getini("addopts")]
    given += map(str, config.invocation_params.args)
    ground = f"--rehearse={options.rehearse}" if options.rehearse else f"--gpus={options.gpus}"
    ini_file = [f"-c={config.inipath}"] if config.inipath else []
    paths = {str(path) for path in config.option.file_or_dir}
    return (
        *kept(given, paths),
        ground,
        f"--rootdir={_root(items[0])}",
        *ini_file,
        *_cache(config),
        "-o=addopts=",
        "--maxfail=0",  # -x may stand in one piece with other letters
        *(_absolute(item) for item in items),
    )


def kept(given: Sequence[str], paths: Collection[str]) -> Iterator[str]:
    """`given` without the options above, with their values, and without `paths`."""
    left_out = False
    for argument in given:
        option, equals, _ = argument.partition("=")
        if left_out:
            left_out = False
        elif option in WITH_A_VALUE:
            left_out = not equals
        elif option not in WITHOUT and argument not in paths and not _is_short(argument):
            yield argument


def _is_short(argument: str) -> bool:
    """Whether it is an option of one letter with its value in one piece: -kslow."""
    return any(len(option) == 2 and argument.startswith(option) for option in WITH_A_VALUE)


def _root(item: pytest.Item) -> Path:
    """The folder from which the path in a node id counts: pytest's own, but for what --pyargs finds elsewhere. Those
    count from what pytest was told, which on a node is each file by itself."""
    file = PurePath(item.nodeid.partition("::")[0])
    counts_from = item.path.parents[len(file.parts) - 1]
    return counts_from if counts_from / file == item.path else item.config.rootpath


def _cache(config: pytest.Config) -> Iterator[str]:
    """Where pytest's cache is here, whichever folder ids count from: there it would be another file of a package."""
    if config.pluginmanager.hasplugin("cacheprovider"):
        yield f"-o=cache_dir={config.rootpath / config.getini('cache_dir')}"


def _absolute(item: pytest.Item) -> str:
    """A node id by the path of its file, whichever folder ids count from."""
    _, colons, names = item.nodeid.partition("::")
    return f"{item.path}{colons}{names}"
