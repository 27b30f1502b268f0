"""What of this package pytest leaves as it is, and what it rewrites."""

from importlib.machinery import SourceFileLoader

import pytest_gpufleet
from pytest_gpufleet.plugin.own_bytecode import OwnModules

LOADERS = """
import sys

def test_loaders():
    told = {name: type(sys.modules[name].__loader__).__name__ for name in (__name__, "pytest_gpufleet.run.run")}
    assert told == {__name__: "AssertionRewritingHook", "pytest_gpufleet.run.run": "SourceFileLoader"}
"""


def test_only_assertions_that_users_read_are_rewritten(run_fresh):
    run = run_fresh(files={"test_inner.py": LOADERS})
    assert run.status == 0, run.text


def test_the_suite_in_the_wheel_is_left_to_pytest_as_are_others():
    path = list(pytest_gpufleet.__path__)
    own = OwnModules().find_spec("pytest_gpufleet.cli", path)
    assert own is not None
    assert isinstance(own.loader, SourceFileLoader)
    for name in ("pytest_gpufleet.acceptance", "pytest_gpufleet.acceptance.test_1_inventory", "somebody.else"):
        assert OwnModules().find_spec(name, path) is None
