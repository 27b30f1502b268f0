"""The command `gpufleet`. Nothing that it loads needs pytest, torch or a GPU."""

import argparse
import difflib
import sys
import textwrap
from collections.abc import Sequence

from pytest_gpufleet import __version__
from pytest_gpufleet.commands.accept import accept
from pytest_gpufleet.commands.command import print_line, printing
from pytest_gpufleet.commands.fleet import fleet
from pytest_gpufleet.commands.monitor import monitor, snapshot
from pytest_gpufleet.commands.power import show_power
from pytest_gpufleet.commands.runs import calibrate, compare, export, judge, order, report
from pytest_gpufleet.commands.verify import sign, verify
from pytest_gpufleet.machine.nvml import NoGpus
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.report.wording import capitalised

BY_PURPOSE = {
    "Run": {"accept": accept},
    "Read a run": {
        "report": report, "verify": verify, "sign": sign, "judge": judge, "compare": compare, "fleet": fleet,
        "export": export,
    },
    "Limits": {"calibrate": calibrate, "order": order, "power": show_power},
    "Look at this machine": {"snapshot": snapshot, "monitor": monitor},
}  # fmt: skip
COMMANDS = {name: command for commands in BY_PURPOSE.values() for name, command in commands.items()}
STATUSES = "Exit status: 0 if all is well, 1 if it could not be done, 2 for arguments that make no sense."


def _parser() -> argparse.ArgumentParser:
    listed = []
    for purpose, commands in BY_PURPOSE.items():
        texts = (f"{name:<11}{command.help}" for name, command in commands.items())
        lines = (textwrap.fill(text, 78, initial_indent="  ", subsequent_indent=" " * 13) for text in texts)
        listed.append("\n".join([f"{purpose}:", *lines]))
    parser = argparse.ArgumentParser(
        prog="gpufleet",
        usage="gpufleet [-h] [--version] COMMAND ...",
        description="Acceptance testing for GPU servers.",
        epilog="\n\n".join([*listed, "Each COMMAND has a --help of its own."]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"pytest-gpufleet {__version__}")
    subparsers = parser.add_subparsers(prog="gpufleet", metavar="COMMAND", help=argparse.SUPPRESS, required=True)
    for name, command in COMMANDS.items():
        epilog = " ".join(filter(None, (STATUSES, command.statuses)))
        description = f"{capitalised(command.help)}. {command.details}"
        subparser = subparsers.add_parser(name, description=description, epilog=epilog)
        for names, how in command.arguments:
            subparser.add_argument(*names, **how)
        subparser.set_defaults(run=command.run, passes_on=command.passes_on)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status: the command's own; 1 if it could not be done; 2 for bad arguments."""
    parser, arguments = _parser(), sys.argv[1:] if arguments is None else arguments
    if not arguments:
        parser.print_help(sys.stderr)
        return 2
    if (word := arguments[0]) not in COMMANDS and not word.startswith("-"):
        near = difflib.get_close_matches(word, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "`gpufleet` lists the commands"
        parser.error(f"{word!r} is no command: {hint}")
    given, unknown = parser.parse_known_args(arguments)
    given.passed_on = unknown
    if given.passed_on and not given.passes_on:
        parser.error(f"unrecognized arguments: {' '.join(given.passed_on)}")
    status: int = 0
    try:
        with printing():  # a command without end ends with its reader: `gpufleet monitor --json | head -1`
            status = given.run(given)
    except (Refused, NoGpus) as error:
        print_line(f"gpufleet: {error}", file=sys.stderr)
        return 1
    return status
