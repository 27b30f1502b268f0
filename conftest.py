"""Makes a clone run where it is not installed: `pytest acceptance/ --gpus 8`. Where it is installed it does nothing."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

INSTALLED = find_spec("pytest_gpufleet") is not None
# What has to be there, by the name that Python imports and the one that pip installs.
NEEDS = {
    "torch": "torch",
    "torchvision": "torchvision",
    "pytest_html": "pytest-html",
    "pynvml": "nvidia-ml-py",
    "cloudpickle": "cloudpickle",
    "msgspec": "msgspec",
    "jinja2": "jinja2",
    "matplotlib": "matplotlib",
    "rich": "rich",
    "tomli_w": "tomli-w",
    **({} if sys.version_info >= (3, 11) else {"tomli": "tomli"}),
}
MISSING = [] if INSTALLED else [name for module, name in NEEDS.items() if find_spec(module) is None]

if not INSTALLED and not MISSING:
    sys.path.insert(0, str(Path(__file__).with_name("src")))
    pytest_plugins = ["pytest_gpufleet.plugin.plugin"]


def pytest_addoption() -> None:
    if MISSING:
        raise pytest.UsageError(
            f"pytest-gpufleet needs {', '.join(MISSING)}: {sys.executable} -m pip install {' '.join(MISSING)}"
        )
