"""How a run gets into a cluster of Ray, and whether that lets in everybody: whoever reaches its ports runs code there.

What Ray says of itself by its environment is about this process. So it is tried: a process without a token knocks.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from pytest_gpufleet.model.event_values import Secured
from pytest_gpufleet.model.refused import Refused

MODE = "RAY_AUTH_MODE"
MISSING = "--nodes needs Ray on every node, which is not installed here: pip install 'pytest-gpufleet[ray]'"
LEAST = "2.52"  # as in pyproject.toml
# A driver whose head is gone ends itself after 60 s, without a report; a run ends by its own deadlines. And no copy of
# the environment of `uv run` is built on every node: what is installed there is held against what is installed here.
DRIVER = {"RAY_gcs_rpc_server_reconnect_timeout_s": str(7 * 24 * 3600), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
KNOCK_SECONDS = 30.0  # for a process that imports Ray and asks
BOOT = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from pytest_gpufleet.nodes import ray_access; ray_access.knock(sys.argv[1])"
)
CONNECT_SECONDS = 5.0
UP = 1  # IFF_UP, linux/if.h


class Knock(msgspec.Struct, frozen=True):
    """`address` of the cluster, "" if there is none. `why` this process was not let in; "" if it was."""

    address: str = ""
    refused: bool = False
    why: str = ""


@dataclass(frozen=True)
class Access:
    """`asks`: nobody is let in without a token."""

    address: str
    asks: bool

    @property
    def environment(self) -> dict[str, str]:
        """What this process needs in its environment before it imports Ray, which reads it then."""
        return {**DRIVER, MODE: "token" if self.asks else "disabled"}


def find(address: str | None) -> Access:
    """The cluster at this address (None: as Ray finds it), which lets this process in. Refused if there is none."""
    try:
        here = version("ray")  # not whether it can be imported: so can any folder of this name
    except PackageNotFoundError:
        raise Refused(MISSING) from None
    if _numbers(here) < _numbers(LEAST):
        raise Refused(f"--nodes needs Ray {LEAST} or later, which knows of tokens; here is {here}")
    wanted = address or os.environ.get("RAY_ADDRESS") or "auto"
    if "://" in wanted:
        raise Refused(f"{wanted} is an address for Ray's client: run on a node of the cluster, and give HOST:PORT")
    without, own = (_begin(wanted, mode) for mode in ("disabled", "token"))
    stranger, ours = _outcome(without), _outcome(own)
    if not stranger.refused and stranger.why:
        raise Refused(f"no cluster of Ray answers ({stranger.address or wanted}): {stranger.why}")
    if stranger.refused and ours.why:
        raise Refused(
            f"the cluster of Ray at {stranger.address} asks for a token, and this process has none or another one: "
            "RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token has to be that of the head"
        )
    return Access(stranger.address, stranger.refused)


def secured(access: Access, addresses: Iterable[str], insecure: bool) -> Secured:
    """What keeps strangers out of a cluster with nodes of these addresses. Refused if nothing does, and that was not
    accepted (`insecure`)."""
    if access.asks:
        return "token"
    if all(map(_is_loopback, addresses)) and not _other_interfaces():
        return "loopback"
    if insecure:
        return "insecure"
    raise Refused(
        f"the cluster of Ray at {access.address} lets in whoever reaches its ports, to run what they like on every "
        "node: start it with RAY_AUTH_MODE=token on all nodes, or accept that by --fleet-insecure"
    )


def _is_loopback(address: str) -> bool:
    """Not the name of a host, which `ray start --node-ip-address` takes as it is (seen in 2.60)."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _numbers(version: str) -> tuple[int, ...]:
    """ "2.60.0rc1" is (2, 60): as far as a version says what a release knows."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _other_interfaces() -> list[str]:
    """Those that are up, beside loopback: Ray listens on all of them, whatever address it was given (seen in 2.60)."""
    up = [path.parent.name for path in Path("/sys/class/net").glob("*/flags") if int(path.read_text(), 16) & UP]
    return sorted(set(up) - {"lo"})


def _begin(address: str, mode: str) -> subprocess.Popen[bytes]:
    environment: Mapping[str, str] = {**os.environ, MODE: mode}
    return subprocess.Popen(
        [sys.executable, "-c", BOOT, address, *sys.path],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def _outcome(process: subprocess.Popen[bytes]) -> Knock:
    with process:
        try:
            told, _ = process.communicate(timeout=KNOCK_SECONDS)
            return msgspec.json.decode(told, type=Knock)
        except subprocess.TimeoutExpired:
            return Knock(why=f"nothing within {KNOCK_SECONDS:g} s")
        except ValueError:  # it crashes where it needs a token and finds none
            return Knock(why=f"the process that asked ended with {process.returncode}")
        finally:
            process.kill()


def knock(address: str) -> None:
    """The life of a process that is ended by whoever waits for its answer."""
    from ray._private.services import canonicalize_bootstrap_address
    from ray._raylet import GcsClient
    from ray.exceptions import AuthenticationError

    found = ""
    try:
        found = canonicalize_bootstrap_address(address) or ""
        host, _, port = found.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()  # Ray tries for a minute
        GcsClient(address=found)
        outcome = Knock(found)
    except AuthenticationError as error:
        outcome = Knock(found, refused=True, why=str(error))
    except Exception as error:
        outcome = Knock(found, why=" ".join(str(error).split()))
    sys.stdout.buffer.write(msgspec.json.encode(outcome))
    sys.stdout.flush()
    os._exit(0)
