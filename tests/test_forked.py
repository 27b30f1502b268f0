"""A Python that is forked finds what a fresh one finds."""

import json
import os
import resource
import subprocess
import sys

from tests.conftest import KEPT, ROOT, lay_out
from tests.forked import Forked, Started

DESCRIBES = """
import json, os, resource, signal, sys

def test_it():
    passed = int(os.environ["PASSED"])
    described = {
        "arguments": sys.argv,
        "path": sys.path,
        "folder": os.getcwd(),
        "environment": {**os.environ, "PASSED": ""},
        "parent": os.getppid(),
        "leads a session": os.getsid(0) == os.getpid(),
        "open files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "handlers": [str(signal.getsignal(number)) for number in (1, 2, 13, 15)],
        "masked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, ())],
        "passed on": os.read(passed, 100).decode(),
        "streams": [os.isatty(number) for number in (0, 1, 2)],
    }
    with open("described.json", "w") as file:
        json.dump(described, file)
"""


def described(start, folder, descriptor):
    command = [sys.executable, "-m", "pytest", "-s", "-p", "no:cacheprovider"]
    with start(
        command, cwd=folder, env={**KEPT, "PYTHONPATH": str(ROOT), "PASSED": str(descriptor)}, pass_fds=[descriptor],
        start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.wait() == 0
    return json.loads((folder / "described.json").read_text())


def test_it_finds_what_a_fresh_one_finds(tmp_path):
    Forked.nursery()  # which is there before the limit is changed
    lay_out(tmp_path, {"test_inner.py": DESCRIBES})
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    found = []
    try:
        for start in (Forked, Started):
            read, write = os.pipe()
            os.write(write, b"something")
            os.close(write)
            found.append(described(start, tmp_path, read))
            os.close(read)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    forked, fresh = found
    assert forked == fresh
    assert (forked["parent"], forked["passed on"]) == (os.getpid(), "something")
