"""An agent without GPUs, ranks or runs: it answers ranks' parcels by themselves, and has a child, as agents do."""

import os
import select
import socket
import subprocess
import sys
import time

from pytest_gpufleet.model import codec
from pytest_gpufleet.nodes.agent_process import AgentProcess, AgentSettings, Frames
from pytest_gpufleet.nodes.messages import Ask, Beat, End, Ending, Pulse, RankAnswered, Reply, Submit, ToAgent
from tests.nodes.fake_transport import hello


def begin(settings: AgentSettings) -> AgentProcess:
    """Instead of agent_process.start."""
    ours, theirs = socket.socketpair()
    with theirs:
        boot = "import sys; sys.path[:] = sys.argv[2:]; from tests.nodes import stub_agent; stub_agent.main()"
        process = subprocess.Popen(
            [sys.executable, "-c", boot, str(theirs.fileno()), *sys.path], pass_fds=[theirs.fileno()]
        )
    return AgentProcess(process, Frames(ours))


def main() -> None:
    frames = Frames(socket.socket(fileno=int(sys.argv[1])))

    def say(message: object) -> None:
        frames.send(codec.packed(message))
        while frames.has_unsent:
            select.select([], [frames], [])
            frames.flush()

    child = subprocess.Popen(["sleep", "600"])
    say(hello(pid=os.getpid(), host=str(child.pid)))
    while True:
        select.select([frames], [], [])
        try:
            parcels = frames.receive()
        except EOFError:
            child.kill()
            sys.exit("its controller is gone")
        for parcel in parcels:
            match codec.unpacked(parcel, ToAgent):
                case Submit(ranks, parcel):
                    for rank in ranks:
                        say(RankAnswered(rank, parcel))
                case Ask(number):
                    say(Reply(number, codec.packed("tcp://127.0.0.1:1")))
                case Beat():
                    say(Pulse(clock=time.time()))
                case End(why):
                    child.kill()
                    child.wait()
                    say(Ending(why))
                    sys.exit()
