"""Agents without GPUs, ranks or runs: they answer ranks' parcels by themselves."""

import os
import subprocess
import sys
import time

from pytest_gpufleet.model import codec
from pytest_gpufleet.nodes import wire
from pytest_gpufleet.nodes.messages import Ask, Beat, DialIn, End, Ending, Pulse, RankAnswered, Reply, Submit, ToAgent
from tests.nodes.fake_transport import hello


class Stubs:
    """A transport.Starter."""

    name, secured, secret = "stubs", "loopback", bytes(range(wire.KEY_BYTES))

    def __init__(self, count: int) -> None:
        self.own = range(count)
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, port: int) -> dict[int, str]:
        boot = "import sys; sys.path[:] = sys.argv[3:]; from tests.nodes import stub_agent; stub_agent.main()"
        for index in self.own:
            command = [sys.executable, "-c", boot, str(index), str(port), *sys.path]
            self.processes.append(subprocess.Popen(command))
        return {index: f"gf{index}" for index in self.own}

    def ended(self) -> dict[int, str]:
        return {index: "it died" for index, process in enumerate(self.processes) if process.poll() is not None}

    def close(self, timeout: float) -> dict[int, str]:
        for process in self.processes:
            process.kill()
            process.wait()
        return {}


def main() -> None:
    index, port = map(int, sys.argv[1:3])
    connection = wire.Dialled(Stubs.secret, "", f"127.0.0.1:{port}")

    def say(message: object) -> None:
        connection.line.send(codec.packed(message))

    say(DialIn(f"gf{index}", index))
    say(hello(pid=os.getpid()))
    while True:
        connection._socket.poll(1000)
        for message in connection.receive():
            match codec.unpacked(message, ToAgent):
                case Submit(ranks, parcel):
                    for rank in ranks:
                        say(RankAnswered(rank, parcel))
                case Ask(number):
                    say(Reply(number, codec.packed("tcp://127.0.0.1:1")))
                case Beat():
                    say(Pulse(clock=time.time()))
                case End(why):
                    say(Ending(why))
                    connection.close(5.0)
                    sys.exit()
