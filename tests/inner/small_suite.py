"""Every level asks for two files of the suite alone: a run of them can be ACCEPTED. Loaded with `-p`."""

from pytest_gpufleet.model.suite import Suite

FILES = ("test_2_health.py", "test_9_endurance.py")


def pytest_configure():
    of_all = Suite.required
    Suite.required = lambda suite, level, nodes=1: [
        name for name in of_all(suite, level, nodes) if name.startswith(FILES)
    ]
