"""Hosts that are not there: each a network, process, host name and mount namespace of its own, with cables to a switch.

Nothing of them has a name outside: they end with the processes that hold them, and so with whoever made them.
"""

import os
import shutil
import signal
import subprocess
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

TURN_SECONDS = 0.1  # a look at all processes takes 0.01 s
# Of a host: its name, its own folders for Ray and for shared memory, the names of all, its loopback.
BEGIN = """
mount --make-rprivate / && hostname {name} && mkdir -p /tmp/ray {own} {own}/tmp && mount --bind {own} /tmp/ray \
&& mount --bind {names} /etc/hosts && mount -t tmpfs tmpfs /dev/shm && ip link set lo up \
&& echo ready && exec sleep infinity
"""


def possible():
    """Why there can be no hosts here; "" if there can."""
    if os.geteuid() != 0:
        return "namespaces need root"
    for tool in ("ip", "tc", "unshare", "nsenter", "setpriv"):
        if shutil.which(tool) is None:
            return f"there is no {tool}"
    tried = subprocess.run(
        ["unshare", "-n", "-u", "-p", "-m", "-f", "--mount-proc", "sh", "-c", "ip link add x type veth peer name y"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    return f"no namespaces with networks: {tried.stderr.strip()}" if tried.returncode else ""


def _do(*command):
    subprocess.run([str(each) for each in command], check=True, capture_output=True, text=True)


@dataclass
class Namespace:
    """Something that holds namespaces: `holder` has started `pid`, the first process in them."""

    holder: subprocess.Popen[str]
    pid: int

    @classmethod
    def begin(cls, script, *kinds):
        holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", *kinds, "-f", "--kill-child", "sh", "-c", script],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert holder.stdout is not None
        assert holder.stdout.readline() == "ready\n"
        return cls(holder, int(Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()[0]))

    def end(self):
        """As when the power fails: every process in it is gone at once."""
        self.holder.kill()
        self.holder.wait()


@dataclass
class Host:
    """`addresses`: one on each network, which it reaches through the interfaces "rail0", "rail1" ... `folder`: what it
    finds as /tmp/ray."""

    index: int
    name: str
    addresses: tuple[str, ...]
    space: Namespace
    switch: Namespace
    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)  # the other ends, outside

    @property
    def temporary(self):
        return self.folder / "tmp"

    def inside(self, *command, folder=Path("/")):
        """A command, as it is started on this host from outside."""
        into = ("nsenter", "-t", self.space.pid, "-n", "-u", "-p", "-m", "env", "-C", folder)
        return [str(word) for word in (*into, *command)]

    def do(self, *command):
        _do(*self.inside(*command))

    def start(self, *command, environment, output, folder):
        """A process of this host, whose output goes into a file."""
        with output.open("ab") as file:
            process = subprocess.Popen(
                self.inside(*command, folder=folder), env=environment, stdout=file, stderr=file,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
        self.started.append(process)
        return process

    def processes(self):
        if self.space.holder.poll() is not None:
            return {}
        namespace = os.readlink(f"/proc/{self.space.pid}/ns/pid")
        found = {}
        for each in Path("/proc").glob("[0-9]*"):
            try:
                if os.readlink(each / "ns/pid") == namespace and int(each.name) != self.space.pid:
                    line = (each / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                    if line:  # else it is dead
                        found[int(each.name)] = line
            except OSError:
                pass
        return found

    def signal(self, number, *words):
        """Send a signal to the processes in whose command line all these words are; to all, without any."""
        meant = [pid for pid, line in self.processes().items() if all(word in line for word in words)]
        for pid in meant:
            os.kill(pid, number)
        if number == signal.SIGCONT:  # nsenter stops when what it has started is stopped, and does not go on with it
            for process in self.started:
                process.send_signal(number)
        return meant

    def slow(self, megabits, rail=0):
        """Let no more through in a second, in both directions: out of the host, and out of its port of the switch."""
        limit = ("root", "tbf", "rate", f"{megabits}mbit", "burst", "64kb", "latency", "400ms")
        self.do("tc", "qdisc", "replace", "dev", f"rail{rail}", *limit)
        _do(*self._at_switch("tc", "qdisc", "replace", "dev", self._port(rail), *limit))

    def pull_cable(self, rail=0):
        _do(*self._at_switch("ip", "link", "set", self._port(rail), "down"))

    def put_cable_back(self, rail=0):
        _do(*self._at_switch("ip", "link", "set", self._port(rail), "up"))

    def do_not_send_to(self, other, ports=""):
        """What this host sends to another one goes nowhere, or what it sends to these TCP ports. It hears all."""
        where = ("to", other.addresses[0], *(("ipproto", "tcp", "dport", ports) if ports else ()))
        self.do("ip", "rule", "add", *where, "priority", 100, "blackhole")

    def send_again(self):
        self.do("sh", "-c", "while ip rule del priority 100 2>/dev/null; do :; done")

    def fill_disk(self):
        self.do("sh", "-c", f"cat /dev/zero >{self.temporary}/much 2>/dev/null || true")

    def mend(self):
        if self.space.holder.poll() is None:
            self.put_cable_back()
            self.send_again()
            self.do("sh", "-c", f"umount --lazy {self.temporary} 2>/dev/null || true")

    def put_over(self, folder, other):
        """Let this host alone find `other` where `folder` is."""
        self.do("mount", "--bind", other, folder)

    def take_off(self, folder):
        self.do("umount", folder)

    def connect(self, rail):
        port, inside = self._port(rail), f"rail{rail}"
        _do(
            *self._at_switch("ip", "link", "add", port, "type", "veth", "peer", "name", inside, "netns", self.space.pid)
        )
        _do(*self._at_switch("ip", "link", "set", port, "master", f"bridge{rail}", "up"))
        self.do("ip", "addr", "add", f"{self.addresses[rail]}/24", "dev", inside)
        self.do("ip", "link", "set", inside, "up")

    def _port(self, rail):
        return f"port{self.index}r{rail}"

    def _at_switch(self, *command):
        return ("nsenter", "-t", self.switch.pid, "-n", *command)


@contextmanager
def hosts(count, folder, rails=1):
    """Hosts "gf0", "gf1" ... that reach each other on `rails` networks 10.99.0.0/24, 10.99.1.0/24 ... `folder` is for
    what each has of its own."""
    with ExitStack() as stack:
        switch = Namespace.begin("ip link set lo up && echo ready && exec sleep infinity", "-n")
        stack.callback(switch.end)
        for rail in range(rails):
            _do("nsenter", "-t", switch.pid, "-n", "ip", "link", "add", f"bridge{rail}", "type", "bridge")
            _do("nsenter", "-t", switch.pid, "-n", "ip", "link", "set", f"bridge{rail}", "up")
        made = []
        names = folder / "hosts"
        names.write_text("127.0.0.1 localhost\n" + "".join(f"10.99.0.{10 + each} gf{each}\n" for each in range(count)))
        for index in range(count):
            own = folder / f"gf{index}"
            space = Namespace.begin(
                BEGIN.format(name=own.name, own=own, names=names), "-n", "-u", "-p", "-m", "--mount-proc"
            )
            stack.callback(space.end)
            addresses = tuple(f"10.99.{rail}.{10 + index}" for rail in range(rails))
            made.append(Host(index, own.name, addresses, space, switch, own))
            for rail in range(rails):
                made[index].connect(rail)
        yield made


def until(what, holds, seconds):
    """Wait for something that another process does. AssertionError that says what, after so many seconds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(TURN_SECONDS)
