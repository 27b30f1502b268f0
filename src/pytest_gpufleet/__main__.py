"""The command `gpufleet`, which is `python -m pytest_gpufleet` too."""

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        from pytest_gpufleet import cli

        return cli.main(arguments)
    except ModuleNotFoundError as error:
        from pytest_gpufleet.run.settings import NEEDS

        lacks = NEEDS.get(str(error.name), error.name)  # pynvml is another package than the one that brings it
        how = f"{sys.executable} -m pip install {lacks}"
        print(f"gpufleet: {lacks} is not installed, which this needs: {how}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:  # 128 + SIGINT, as of a process that it ends: what was not done must not look done
        return 130


if __name__ == "__main__":
    sys.exit(main())
