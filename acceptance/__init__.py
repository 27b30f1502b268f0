"""The acceptance suite: `pytest acceptance/` in a clone, `pytest --pyargs pytest_gpufleet.acceptance` where a wheel is
installed."""
