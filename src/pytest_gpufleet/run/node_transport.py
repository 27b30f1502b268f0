"""What carries messages to the nodes that a run was asked for."""

from __future__ import annotations

import os

import msgspec

from pytest_gpufleet.nodes.agent_process import AgentSettings
from pytest_gpufleet.nodes.transport import LocalTransport, Transport
from pytest_gpufleet.run.run import likely
from pytest_gpufleet.run.settings import Options


def settings_for(options: Options) -> AgentSettings:
    """What the agent of every node is told."""
    gpus = options.gpus if isinstance(options.gpus, int) else None
    return AgentSettings(os.getcwd(), rehearse=options.rehearse, gpus=gpus, suite=options.paths, likely=likely(options))


def transport_for(options: Options) -> Transport:
    """The agents of a rehearsal of this machine are its processes; all others are those of a Ray cluster."""
    settings = settings_for(options)
    wanted = options.nodes if isinstance(options.nodes, int) else None
    if options.rehearse and options.address is None:
        names = [f"node{number}" for number in range(wanted or 1)]  # options.from_config sees to it that it is a number
        return LocalTransport([msgspec.structs.replace(settings, name=name) for name in names])
    from pytest_gpufleet.nodes.ray_transport import RayTransport

    return RayTransport(settings, wanted, options.address, options.insecure)
