"""`python -m pytest_gpufleet` is the command `gpufleet`."""

import sys

from pytest_gpufleet.cli import main

if __name__ == "__main__":
    sys.exit(main())
