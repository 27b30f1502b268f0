"""How a run was started, for whoever is to start it again."""

from __future__ import annotations

import shlex

import msgspec

# The variable of the environment by which what calls pytest with the suite, and behind it all that was typed, says so.
STARTED_BY = "GPUFLEET_STARTED_BY"


class CommandLine(msgspec.Struct, frozen=True):
    """`start`: what was typed before all arguments. `arguments`: those that were typed, as a shell takes them. `suite`:
    the arguments by which the whole suite is named; "" where `start` names it. `variable`: of make, in which arguments
    stand."""

    start: str
    arguments: str
    suite: str = ""
    variable: str = ""

    @property
    def typed(self) -> str:
        return self._with(self.arguments)

    def once_more(self, more: str) -> str:
        """The same with more arguments."""
        return self._with(self.arguments, more)

    def of_all(self, arguments: str) -> str:
        """Of the whole suite, with these arguments alone."""
        return self._with(self.suite, arguments)

    def _with(self, *arguments: str) -> str:
        told = " ".join(filter(None, arguments))
        if self.variable:
            told = f"{self.variable}={shlex.quote(told)}" if told else ""
        return " ".join(filter(None, (self.start, told)))
