"""The recorded runs of the report's tests, whose columns are part of the plugin."""

from tests.report.conftest import bad_gpu, recorded

__all__ = ["bad_gpu", "recorded"]
