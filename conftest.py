"""Makes a clone run where it is not installed: `pytest acceptance/ --gpus 8`. Where it is installed it does nothing."""

import sys
from importlib.util import find_spec
from pathlib import Path

if find_spec("pytest_gpufleet") is None:
    sys.path.insert(0, str(Path(__file__).with_name("src")))
    pytest_plugins = ["pytest_gpufleet.plugin.plugin"]
