"""What carries messages to the nodes that a run was asked for."""

from __future__ import annotations

import os

import msgspec

from pytest_gpufleet.model.refused import Refused
from pytest_gpufleet.nodes.agent_process import AgentSettings
from pytest_gpufleet.nodes.local_transport import LocalTransport
from pytest_gpufleet.nodes.transport import Transport
from pytest_gpufleet.run.settings import Options


def transport_for(options: Options) -> Transport:
    """Refused if there is none."""
    settings = AgentSettings(os.getcwd(), rehearse=options.rehearse)
    if options.rehearse and options.address is None:
        assert isinstance(options.nodes, int)  # options.from_config sees to it
        return LocalTransport([msgspec.structs.replace(settings, name=f"node{n}") for n in range(options.nodes)])
    raise Refused("--nodes on a Ray cluster is not part of this version yet")
