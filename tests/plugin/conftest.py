"""The recorded runs of the report's tests, whose columns are part of the plugin."""

from tests.report.conftest import recorded, rejected

__all__ = ["recorded", "rejected"]
