"""The acceptance suite: `pytest acceptance/` in a clone, `pytest --pyargs pytest_gpufleet.acceptance` where a wheel is
installed."""

import pytest_gpufleet as pytest_gpufleet  # which refuses to be started by Python alone
