"""What a run is asked for, without one."""

import pytest
from _pytest.config import get_config

from pytest_gpufleet.plugin import options
from tests.conftest import lay_out


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """asked(*arguments, ini=""): the Options of pytest in tmp_path, with these lines in its ini file, or UsageError."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")

    def read(*arguments, ini=""):
        lay_out(tmp_path, {"pytest.ini": f"[pytest]\n{ini}\n"})
        given = ["-p", "pytest_gpufleet.plugin.plugin", "-p", "no:cacheprovider", "--assert=plain", *arguments]
        config = get_config(given)
        try:
            config.parse(given)
            return options.from_config(config)
        finally:
            config._ensure_unconfigure()

    return read
