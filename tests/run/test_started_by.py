"""What was typed to start a run can be typed again, with more arguments, and for the whole suite."""

from pathlib import Path

import pytest

from pytest_gpufleet.model.events import STARTED_BY
from pytest_gpufleet.model.suite import PACKAGED
from pytest_gpufleet.run.opening import command_line
from tests.conftest import ACCEPTANCE as SUITE, ROOT

EACH = "acceptance/test_4_each_gpu.py"
THERE = f"{SUITE}/test_4_each_gpu.py"
PYARGS, BY_PACKAGE = "--pyargs", f"pytest --pyargs {PACKAGED}"
PART = ["--gpus", "8", "-k", "bandwidth or soak"]
TYPED = "--gpus 8 -k 'bandwidth or soak'"
QUOTED = """--gpus 8 -k '"'"'bandwidth or soak'"'"'"""  # the same within '...'
TO_MAKE = f"make accept ARGS='{QUOTED}'"


@pytest.mark.parametrize(("caller", "arguments", "typed", "whole"), [
    ("", [EACH, *PART], f"pytest {EACH} {TYPED}", "pytest acceptance/ --gpus 8"),
    ("", [*PART, f"{THERE}::test_soak", "a"], f"pytest {TYPED} {THERE}::test_soak a", f"pytest {SUITE}/ --gpus 8"),
    ("", [PYARGS, f"{PACKAGED}.x", *PART], f"pytest {PYARGS} {PACKAGED}.x {TYPED}", f"{BY_PACKAGE} --gpus 8"),
    ("gpufleet accept", [PYARGS, PACKAGED, *PART], f"gpufleet accept {TYPED}", "gpufleet accept --gpus 8"),
    ("gpufleet accept", [f"{SUITE}", *PART], f"gpufleet accept {TYPED}", "gpufleet accept --gpus 8"),  # in a clone
    ("make accept", ["acceptance/", *PART], TO_MAKE, "make accept ARGS='--gpus 8'"),
    ("make accept", ["acceptance/"], "make accept", None),
    ("rm -rf", ["acceptance/"], "pytest acceptance/", None),  # whatever somebody has set
])  # fmt: skip
def test_what_was_typed_can_be_typed_again(monkeypatch, caller, arguments, typed, whole):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv(STARTED_BY, caller)
    line = command_line(arguments)
    assert line.typed() == typed
    made = {"make accept": "make accept ARGS='--fleet-resume DIR'", TO_MAKE: f"{TO_MAKE[:-1]} --fleet-resume DIR'"}
    assert line.typed("--fleet-resume DIR") == made.get(typed, f"{typed} --fleet-resume DIR")
    assert whole is None or line.typed("--gpus 8", whole_suite=True) == whole


def test_make_says_that_it_starts_the_suite():
    (recipe,) = (line for line in Path(ROOT, "Makefile").read_text().splitlines() if "/pytest acceptance/" in line)
    assert recipe.strip().startswith(f'{STARTED_BY}="make accept" $(BIN)/pytest acceptance/ ')
    assert recipe.endswith(" $(ARGS)")
