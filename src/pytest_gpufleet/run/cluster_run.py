"""A run on many nodes: each checks itself in a run of its own, and between them run the checks that need several."""

import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from pytest_gpufleet.machine.health import Health
from pytest_gpufleet.machine.local_node import Machine
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.events import HostFound, NodeLeftOut, NodeLost, RunHeader
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.hosts_file import NAME, read_hosts
from pytest_gpufleet.model.place import Gpu, GpuTopology, Place, joined, on_node, typed_facts
from pytest_gpufleet.nodes import launchers, ray_launcher, wire
from pytest_gpufleet.nodes.cluster import Cluster, ClusterEngine
from pytest_gpufleet.nodes.messages import Asked, CheckHealth, Hello, Lock, ReadHost
from pytest_gpufleet.run.node_runs import NodeRun, NodeRuns
from pytest_gpufleet.run.run import AT_THE_END, Ranks, Run, likely
from pytest_gpufleet.run.settings import Options
from pytest_gpufleet.run.summary import to_run_again
from pytest_gpufleet.run.target import NodeFacts, Target, node_facts
from pytest_gpufleet.verdict.fleet.fleet_peers import minority
from pytest_gpufleet.verdict.fleet.host_runs import HostRun
from pytest_gpufleet.world.call import Engine


def settings_for(options: Options) -> launchers.AgentSettings:
    """What the agent of every node knows."""
    gpus = options.gpus if isinstance(options.gpus, int) else None
    return launchers.AgentSettings(
        os.getcwd(), rehearse=options.rehearse, gpus=gpus, suite=options.paths, likely=likely(options),
        join_seconds=options.join,
    )  # fmt: skip


def take_part(options: Options) -> None:
    """Where a launcher has started this process on another node than the head's: be its agent, and do not come back."""
    task = _task(options)
    if task is not None and task.index != 0:  # that of the head
        place = f"[{task.head}]" if ":" in task.head else task.head
        settings = msgspec.structs.replace(
            settings_for(options), index=task.index, name=task.own_name, run=task.run, head=f"{place}:{task.port}"
        )
        launchers.become(settings, wire.secret(options.secret_file))


def _task(options: Options) -> launchers.Task | None:
    return None if options.address else launchers.find(os.environ, options.head, options.index)


def _wanted_hosts(options: Options) -> dict[str, str]:
    """The names of the nodes that are waited for, with their racks; none where only their number is known."""
    if options.only_failed is not None:
        task = _task(options)
        own = task.own_name or socket.gethostname() if task else ""
        return dict.fromkeys(to_run_again(options.only_failed, own), "")
    return read_hosts(options.nodes) if isinstance(options.nodes, Path) else {}


def transport_for(options: Options) -> wire.Transport:
    """Agents are processes of this machine in a rehearsal, its own one under a launcher, else started by Ray."""
    settings, task = settings_for(options), _task(options)
    hosts = tuple(_wanted_hosts(options))
    wanted = len(hosts) or (options.nodes if isinstance(options.nodes, int) else None)
    secret, random = wire.secret(options.secret_file, needed=task is not None), os.urandom(wire.KEY_BYTES)
    if task is not None:
        wanted = wanted or task.count
        if wanted is None:
            raise Refused(f"{task.launcher} does not say how many nodes there are: --nodes N")
        hosts = hosts or (task.hosts if len(task.hosts) == wanted else ())
        towards = launchers.own_address(task.head, [host for host in hosts if host != task.own_name])
        own = msgspec.structs.replace(settings, index=0, name=task.own_name, towards=towards, run=task.run)
        starter, again = launchers.OwnAgents(task.launcher, "secret", secret, [own]), options.only_failed
        return wire.Transport(starter, wanted, options.join, hosts, "*", task.port, task.run, again is not None)
    if options.rehearse and options.address is None:
        if wanted is None:
            raise Refused(
                "--nodes all is for nodes that a launcher or Ray starts; a rehearsal of this machine has --nodes N"
            )
        names = hosts or tuple(f"node{number}" for number in range(wanted))
        rehearsed = [msgspec.structs.replace(settings, name=name, index=number) for number, name in enumerate(names)]
        local = launchers.OwnAgents("local", "loopback", random, rehearsed)
        return wire.Transport(local, seconds=options.join, expected=hosts)
    if find_spec("ray") is None:
        raise Refused(
            "no launcher has started this on several nodes: start the same command on each of them (srun, mpirun, or "
            "any way with --fleet-head HOST:PORT), or install Ray: pip install 'pytest-gpufleet[ray]'"
        )
    address = options.address or os.environ.get("RAY_ADDRESS") or "auto"
    starter = ray_launcher.RayAgents(random, ray_launcher.Asked(settings, address, wanted, hosts, options.insecure))
    return wire.Transport(starter, seconds=options.join, expected=hosts, address="*")


class ClusterTarget(Target):
    """`names`: of all nodes, by their numbers, `hellos` of those that are there. `rehearsed`: ranks of each."""

    def __init__(self, names: Mapping[int, str], hellos: Mapping[int, Hello], rehearsed: int) -> None:
        self._hellos = hellos
        self.hosts = dict(names)
        missing = GpuTopology(absent="its agent was never heard")
        # Each as its node describes itself.
        self.topologies = {node: hellos[node].topology if node in hellos else missing for node in names}
        self.topology = joined(self.topologies, self.hosts)
        kernels = {node: hello.machine.get("boot_id") or node for node, hello in hellos.items()}
        count = Counter(kernels.values())
        self.on_host = {node: count[kernel] for node, kernel in kernels.items()}  # so many nodes are on its host
        buses = [(kernels[node], each) for node, hello in hellos.items() for each in enumerate(hello.present)]
        # Those of nodes that are one host are there once.
        self.gpus_present = len({(host, bus or index) for host, (index, bus) in buses})
        self.nodes, self.where = len(hellos), f" of {len(hellos)} nodes"
        self.rehearsal_ranks = rehearsed * len(hellos)
        self.machines = {  # at once: they know how long ago that was. Kernel logs were judged by their own runs
            node: Machine(
                of.topology.on_node(node).gpus, of.machine.host, of.machine.taken, present=of.present, node=node
            )
            for node, of in hellos.items()
        }

    @property
    def why(self) -> str:
        """As the nodes have it that were heard."""
        return joined({node: hello.topology for node, hello in self._hellos.items()}, self.hosts).absent

    @property
    def node_facts(self) -> list[NodeFacts]:
        known = {node: (hello.serial, hello.machine) for node, hello in self._hellos.items()}
        own = {node: known.get(node, (None, HostFound())) for node in self.hosts}
        return [node_facts(node, self.hosts[node], *found, self.topologies[node]) for node, found in own.items()]


class ClusterRun(Run):
    """`alone`: the nodes' own runs go on."""

    health = None  # each node has its own

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ranks = ClusterRanks(self)
        self.alone = True
        self._locked = False  # the GPUs of all nodes that take part

    @cached_property
    def cluster(self) -> Cluster:
        """All agents, started. Refused if there is none, or if they have not the same installation."""
        cluster = Cluster(transport_for(self.options))
        self.open_things.callback(self._end_agents, cluster)
        cluster.start(120.0)  # for processes to start, import from a shared file system and ask the driver
        own, dialled = launchers.own_install(settings_for(self.options)), cluster.transport.dialled
        launchers.refuse_others(own, {cluster.names[node]: who for node, who in dialled.items()})
        if not cluster.hellos:
            text = "; ".join(f"{cluster.names[node]}: {why}" for node, why in cluster.lost.items())
            raise Refused(f"--nodes {self.options.nodes}: no node can be used: {text}")
        return cluster

    @cached_property
    def target(self) -> ClusterTarget:
        return ClusterTarget(self.cluster.names, self.cluster.hellos, self.options.rehearse or 0)

    @cached_property
    def node_runs(self) -> NodeRuns:
        runs = NodeRuns(self.cluster, self.folder)
        self.open_things.callback(runs.close)
        return runs

    def cluster_header(self, header: RunHeader) -> RunHeader:
        hellos, transport = self.cluster.hellos, self.cluster.transport
        return msgspec.structs.replace(
            header, nodes_wanted=self.nodes_wanted, transport=transport.starter.name, secured=transport.starter.secured,
            nodes_missing=tuple(filter(NAME.fullmatch, transport.missing)),  # not "task 3"
            interfaces=tuple(hellos[node].interface if node in hellos else "" for node in self.cluster.names),
        )  # fmt: skip

    def machines(self) -> tuple[Machine, ...]:
        return tuple(self.target.machines[node] for node in self.cluster.alive)

    def runs_of_nodes(self) -> dict[int, HostRun]:
        return self.node_runs.own

    def hosts_now(self, fact: str) -> dict[int, Any]:
        answers = self._answers(ReadHost((fact,)), self.cluster.alive, f"changes of {fact}")
        return {node: typed_facts(host)[fact] for node, host in answers.items()}

    def _answers(self, question: Asked, nodes: Iterable[int], what: str) -> dict[int, Any]:
        """What these nodes answer. One that does not keeps the run from being complete: `what` may have gone unseen."""
        seconds = 3.0 if self.interruption.heard else 30.0  # for what takes a healthy node 0.2 s
        answers, silent = self.cluster.ask_each(dict.fromkeys(nodes, question), seconds)
        for node, why in silent.items():
            self.written.spoil(f"{self.target.hosts[node]}: {what} may have gone unseen: {why}")
        return answers

    @property
    def clocks_ahead(self) -> Mapping[int, float]:
        return self.cluster.clocks_ahead

    def watch(self, hear: Any) -> None:
        super().watch(hear)
        transport, there, wanted = self.cluster.transport, len(self.cluster.names), self.nodes_wanted
        if wanted and wanted != there:
            text = f"{there} {'node is' if there == 1 else 'nodes are'} there, {wanted} were asked for"
            racks = _wanted_hosts(self.options)
            if missing := [f"{name} ({racks[name]})" if racks.get(name) else name for name in transport.missing]:
                text += f": {', '.join(missing)} did not come"
            if knocked := ", ".join(transport.strangers):
                text += f"; with another secret than this run's somebody has knocked from {knocked}"
            self.accuse(Fault("node_missing" if there < wanted else "node_too_many", (), text))
        self.accuse_lost("")

    @property
    def nodes_wanted(self) -> int:
        """0 if all are to be used."""
        return len(_wanted_hosts(self.options)) or (self.options.nodes if isinstance(self.options.nodes, int) else 0)

    def accuse_lost(self, check: str) -> list[Fault]:
        """Put on record the loss of each node of which that was not known yet."""
        faults, lost = [], self.cluster.lost
        for node in lost.keys() - self.written.record.lost.keys():
            self.record(NodeLost(node=node, why=lost[node]))
            faults.append(Fault("node_lost", (Place(node, "node"),), lost[node], "", check, bool(check)))
            self.accuse(faults[-1])
        return faults

    def check_health(self, check: str, failed: bool = False) -> list[Fault]:
        """As of one machine, on all nodes at the same time, once ranks of theirs may have worked together."""
        lost = self.accuse_lost(check)
        self._note_left_out()
        return [*lost, *super().check_health(check, failed)]

    def health_now(self, failed: bool) -> Iterator[Health]:
        watched = self.cluster.alive if self._locked and self.target.topology.gpus else ()
        for node, health in self._answers(CheckHealth(failed), watched, "what got worse").items():
            faults, noticed = (
                tuple(fault.changed(subjects=tuple(on_node(each, node) for each in fault.subjects)) for fault in found)
                for found in (health.faults, health.noticed)
            )
            yield Health(faults, noticed, health.unseen and f"{self.target.hosts[node]}: {health.unseen}")

    def lock(self) -> None:
        """Make the GPUs of all nodes this run's own. Without nodes where others have one, or that do not answer."""
        taken, silent = self.cluster.ask_each(dict.fromkeys(self.cluster.alive, Lock()), 30.0)
        taken |= {node: f"its GPUs could not be locked: {why}" for node, why in silent.items()}
        for node in self.cluster.alive:  # the loss of others is on record
            if why := taken.get(node):
                self._give_up(node, why)
        self._locked = True

    def start_alone(self, arguments: tuple[str, ...], directory: str) -> None:
        """Start the nodes' own runs, and go on without nodes on which that cannot be. Refused if no node is left."""
        nodes = [node for node in self.written.record.run.nodes if node.index in self.cluster.alive]
        troubles = self.node_runs.start(arguments, nodes, directory, self.earlier, self.of_nodes)
        for node, why in troubles.items():
            self._give_up(node, f"its own run could not be started: {why}")
        if troubles and not self.cluster.alive:
            text = "; ".join(f"{self.target.hosts[node]}: {why}" for node, why in troubles.items())
            raise Refused(f"the checks of one machine cannot be started there: {text}")

    def wait_alone(self, show: Callable[[NodeRun], None]) -> None:
        """Until the nodes' own runs are over, and here; then without nodes unfit or unlike most. `show`: each then."""
        self.interruption.before_test()
        runs = self.node_runs.all.values()
        for run in [run for run in runs if run.taken_over]:
            show(run)
        while any(run.at_work for run in runs):
            over = self.node_runs.listen(0.5)
            for run in [*over, *self.node_runs.hung(self.options.hung, len(self.of_nodes))]:
                show(run)
                if run.hung:
                    self._give_up(run.node, run.hung, "node_hung")
                elif run.died and run.lost is None:
                    self._give_up(run.node, run.died, story=run.ended.output if run.ended else "")
            self._note_finished()
            self.accuse_lost("")
            time.sleep(0.1)  # for what hundreds of nodes say, before all of them are looked at
        self.node_runs.settle(self.interruption)
        self._note_finished()
        self.alone = False
        unfit = {run.node: f"its own run came to {run.verdict}" for run in runs if not run.fit}
        for node, why in {**minority(self.runs_of_nodes()), **unfit}.items():
            if node in self.cluster.alive:
                self.leave_out(node, why)

    def _note_finished(self) -> None:
        for run in self.node_runs.read():
            self.record(run.finished(self.node_runs.own[run.node]))

    def _give_up(self, node: int, why: str, code: str = "node_unfit", story: str = "") -> None:
        """Go on without a node that is there and cannot do its part, and hold that against it."""
        self.accuse(Fault(code, (Place(node, "node"),), why, story))
        self.leave_out(node, why)

    def leave_out(self, node: int, why: str) -> None:
        self.cluster.leave_out(node, why)
        self._note_left_out()

    def _note_left_out(self) -> None:
        """Put on record who is left out by now: by this run, or by its ranks' engine."""
        left_out = self.cluster.left_out
        for node in left_out.keys() - self.written.record.left_out.keys():
            self.record(NodeLeftOut(node=node, why=left_out[node]))

    def finish(self, cut_short: bool) -> None:
        """What nodes are still at is not waited for."""
        self.check_health(AT_THE_END)
        self.node_runs.listen(0.0)  # a node that was lost may have come to its end all the same
        self.node_runs.settle(self.interruption, again=True)
        self._note_finished()
        for node, run in self.node_runs.all.items():
            if node not in self.node_runs.own:
                self.record(run.finished(None))
        self.accuse_lost(AT_THE_END)  # while their reports were brought here

    def _end_agents(self, cluster: Cluster) -> None:
        for node, why in cluster.close(15.0).items():
            self.tell(f"{cluster.names.get(node, f'node {node}')}: nobody knows whether its agent has ended: {why}")


class ClusterRanks(Ranks):
    """Those of the nodes that take part, and anew when that changes."""

    _run: ClusterRun

    @property
    def nodes(self) -> int:  # type: ignore[override]
        return len(self._run.cluster.alive)

    def begin_test(self, test: str, of_the_suite: bool, fresh: bool) -> None:
        super().begin_test(test, of_the_suite, fresh)
        pool = self.in_use
        if pool is not None and {spec.node for spec in pool.specs} - {*self._run.cluster.alive}:
            pool.stop()
            self._run.lock()
            pool.start_on(self._specs())

    def get_ready(self) -> None:
        """The agents start what ranks need, and only after their nodes' own runs."""

    def _engine(self) -> Engine:
        return ClusterEngine(self._run.cluster)

    def _gpus_of_nodes(self) -> Mapping[int, tuple[Sequence[Gpu | None], str]]:
        target, rehearsed = self._run.target, (None,) * (self._run.options.rehearse or 0)
        alive = self._run.cluster.alive
        nodes = {node: (rehearsed or target.topologies[node].on_node(node).gpus, target.hosts[node]) for node in alive}
        if not any(gpus for gpus, _ in nodes.values()):
            raise Refused("no rank is left to run on")
        return nodes

    def _threads(self, node: int, size: int, here: int) -> int:
        """Nodes that are one host share its processors."""
        allowed = self._run.cluster.hellos[node].machine.get("processors_allowed")
        return max(1, int(allowed or 1) // (here * self._run.target.on_host[node]))
