"""The command `gpufleet`, which is `python -m pytest_gpufleet` too."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        from pytest_gpufleet import cli

        return cli.main(arguments)
    except ModuleNotFoundError as error:
        how = f"{sys.executable} -m pip install {error.name}"
        print(f"gpufleet: {error.name} is not installed, which this needs: {how}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
