"""What of a host is absent, what cannot be read and by which command it could, and what is read: on a server as a plain
user and as root, in a container, and in virtual machines."""

import os
import signal
import subprocess
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest

from pytest_gpufleet.machine import bmc, disks, host, memory, processors, tools
from pytest_gpufleet.machine.tools import PACKAGES, HostFact, Unreadable, output
from pytest_gpufleet.model.codec import plain
from pytest_gpufleet.model.endings import NotApplicable
from pytest_gpufleet.model.place import Missing
from pytest_gpufleet.plugin.assertions import LiveMachine, of_host
from pytest_gpufleet.run.run import Run
from pytest_gpufleet.run.settings import Options
from tests.acceptance.checks import outcomes
from tests.machine.trees import written
from tests.machines import recorded

CPUINFO = "processor\t: 0\nvendor_id\t: {maker}\nflags\t\t: fpu sse2{flag}\n"
MAKER, PRODUCT = "sys/class/dmi/id/sys_vendor", "sys/class/dmi/id/product_name"
IPMI = "sys/firmware/dmi/entries/38-0/raw"
MODULE = "sys/firmware/dmi/entries/17-0/raw"
DIMM = bytes([17, 0x15, *[0] * 10, 0x00, 0x20, 9, 0, 1, 0, 0x1A, 0, 0]) + b"DIMM_A1\0\0"
PLAIN = DIMM[:8] + bytes([64, 0, 64, 0]) + DIMM[12:]  # without bits for error correction
SERVER = {
    "proc/cpuinfo": CPUINFO.format(maker="GenuineIntel", flag=""),
    "proc/1/comm": "systemd",
    MAKER: "Supermicro",
    IPMI: "",
    MODULE: DIMM,
    "sys/class/nvme/nvme0/transport": "pcie",
    "dev/nvme0": "",
    "dev/ipmi0": "",
}
# Docker shows the /sys of the host without its firmware.
DOCKER = {name: text for name, text in SERVER.items() if not name.startswith(("dev", "sys/firmware"))}
SYSTEMS = {
    "server": SERVER,
    "drivers not loaded": {name: text for name, text in SERVER.items() if name not in ("dev/ipmi0", "dev/nvme0")},
    "no BMC": {name: text for name, text in SERVER.items() if name not in ("dev/ipmi0", IPMI)},
    "drivers for DMI neither": {name: text for name, text in SERVER.items() if name[:7] not in ("sys/fir", "dev/ipm")},
    "workstation": {**{name: text for name, text in SERVER.items() if name not in ("dev/ipmi0", IPMI)}, MODULE: PLAIN},
    "privileged docker": {**SERVER, ".dockerenv": ""},
    "docker": {**DOCKER, ".dockerenv": ""},
    "pod": {**DOCKER, "proc/1/comm": "python3"},
    "firecracker": {"proc/cpuinfo": CPUINFO.format(maker="GenuineIntel", flag=" hypervisor"), "proc/1/comm": "agent"},
    "gVisor": {"proc/cpuinfo": CPUINFO.format(maker="AuthenticAMD", flag="")},
    "QEMU on Arm": {"proc/cpuinfo": "processor\t: 0\nCPU part\t: 0xd4f\n", MAKER: "QEMU"},
    "docker in a VM": {"proc/cpuinfo": CPUINFO.format(maker="GenuineIntel", flag=" hypervisor"), ".dockerenv": ""},
}
READERS = {
    "bmc": bmc.read, "bmc_firmware": bmc.read_firmware, "memory_modules": memory.modules,
    "memory_errors": memory.errors, "disk_health": disks.read_health, "dmi": host.read_dmi,
}  # fmt: skip
ROOT, OUTSIDE = "run as root (sudo)", "run on the host, or start"
BMC_DRIVERS, EDAC = "modprobe -a dmi-sysfs ipmi_si ipmi_ssif ipmi_devintf", "modprobe -a i10nm_edac skx_edac"


def denied(monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    monkeypatch.setattr("pathlib.Path.read_bytes", Mock(side_effect=PermissionError(13, "Permission denied")))


def answer(user, program):
    """As a plain user is answered by smartctl, and root by all."""
    if user == "plain" and program == "nvme":
        raise Unreadable("nvme failed with status 1: Permission denied")
    denied = '{"smartctl":{"exit_status":2,"messages":[{"string":"Permission denied"}]}}'
    return {"ipmitool": "", "smartctl": denied if user == "plain" else "{}"}.get(program, "{}")


def read(name, root, user):
    programs = [lambda program, *arguments, **how: answer(user, program)]
    return READERS[name](root, *(programs if name in ("bmc", "disk_health") else ()))


def fact(name, root, user):
    return host.plain(HostFact(name, Any, partial(read, name, root, user)))


# By system and user: how each subject ends, in the order of READERS. A text: it cannot be read, and how that begins
# which makes it readable. None: it was read.
STATES = {
    ("server", "plain"): (ROOT, BMC_DRIVERS, ROOT, EDAC, ROOT, None),
    ("server", "root"): (None, BMC_DRIVERS, None, EDAC, None, None),
    ("drivers not loaded", "root"): (BMC_DRIVERS, BMC_DRIVERS, None, EDAC, None, None),
    ("no BMC", "root"): ("absent", "absent", None, EDAC, None, None),
    ("drivers for DMI neither", "root"): (BMC_DRIVERS, BMC_DRIVERS, "modprobe dmi-sysfs", EDAC, None, None),
    ("workstation", "root"): ("absent", "absent", None, "absent", None, None),
    ("workstation", "plain"): ("absent", "absent", ROOT, EDAC, ROOT, None),
    ("privileged docker", "root"): (None, BMC_DRIVERS, None, EDAC, None, None),
    ("docker", "root"): (OUTSIDE, OUTSIDE, OUTSIDE, OUTSIDE, None, None),
    ("docker", "plain"): (OUTSIDE, OUTSIDE, OUTSIDE, OUTSIDE, OUTSIDE, None),
    ("pod", "plain"): (OUTSIDE, OUTSIDE, OUTSIDE, OUTSIDE, OUTSIDE, None),
    **{(name, "plain"): ("absent",) * 6 for name in ("firecracker", "gVisor", "docker in a VM")},
    ("QEMU on Arm", "root"): ("absent",) * 5 + (None,),
}  # fmt: skip


@pytest.mark.parametrize(("system", "user"), STATES, ids=[" ".join(each) for each in STATES])
def test_each_subject_is_absent_unreadable_or_read(tmp_path, monkeypatch, system, user):
    root = written(tmp_path, SYSTEMS[system])
    if user == "plain":
        denied(monkeypatch)
    for name, wanted in zip(READERS, STATES[system, user], strict=True):
        found = fact(name, root, user)
        state = ("absent" if found.absent else found.remedy) if isinstance(found, Missing) else None
        assert (name, state and state[: len(wanted or "")]) == (name, wanted)


@pytest.mark.parametrize(
    ("files", "virtual", "contained"),
    [
        (SERVER, False, False),
        ({**SERVER, MAKER: "Amazon EC2", PRODUCT: "p5.metal"}, False, False),
        ({**SERVER, MAKER: "Microsoft Corporation", PRODUCT: "Virtual Machine"}, True, False),
        ({**SERVER, "run/.containerenv": ""}, False, True),
        ({**SERVER, "proc/1/cgroup": "4:memory:/kubepods/burstable/pod1\n"}, False, True),
        ({**SERVER, "proc/1/cgroup": "0::/init.scope\n"}, False, False),
        ({"proc/cpuinfo": "flags\t: fpu\n", "proc/1/comm": "tini"}, False, True),
    ],
    ids=["a server", "metal of a cloud", "Azure", "Podman", "an old pod", "cgroup v2", "a container without /sys"],
)  # fmt: skip
def test_virtual_machines_and_containers(tmp_path, files, virtual, contained):
    root = written(tmp_path, files)
    assert (tools.is_virtual(root), tools.in_container(root)) == (virtual, contained)


def test_amd_processors_have_another_driver(tmp_path):
    with pytest.raises(Unreadable, match="modprobe amd64_edac"):
        memory.errors(written(tmp_path, {**SERVER, "proc/cpuinfo": CPUINFO.format(maker="AuthenticAMD", flag="")}))


HOST_CHECKS = (
    "test_power_supplies_are_sound", "test_fans_are_sound", "test_air_comes_in_cool", "test_bmc_logged_no_grave_error",
    "test_memory_modules_are_alike", "test_host_memory_had_few_errors", "test_host_memory_errors_stayed_rare",
    "test_drives_are_healthy",
)  # fmt: skip


@pytest.mark.parametrize(("system", "what", "remedies"), [
    ("server", "skipped", {ROOT, EDAC}),
    ("docker", "skipped", {tools.hides_host().remedy}),  # all of it is one gap
    ("firecracker", "not applicable", None),
])  # fmt: skip
def test_the_checks_of_the_host_for_a_plain_user(tmp_path, monkeypatch, system, what, remedies):
    root = written(tmp_path, SYSTEMS[system])
    with monkeypatch.context() as patched:
        denied(patched)
        facts = {name: fact(name, root, "plain") for name in READERS}
    here = recorded()
    here.machine.host.update(facts, processor_setup=plain(processors.read(root)))
    ended = outcomes(here, now=facts, before=facts, asked_once=facts.get)
    assert {ended[check].what for check in HOST_CHECKS} == {what}
    messages = {ended[check].message for check in HOST_CHECKS}
    assert remedies is None or {message.rpartition(": ")[2] for message in messages} == remedies
    assert system != "docker" or messages == {f"not judged: {tools.hides_host()}"}


@pytest.mark.parametrize("program", PACKAGES)
def test_a_program_that_is_not_installed_is_named_with_its_package(program, monkeypatch):
    monkeypatch.setenv("PATH", "")
    found = host.plain(host.HostFact("any", str, lambda: host.output(program)))
    assert found == Missing(f"{program} is not installed", remedy=f"apt install {PACKAGES[program]}")


def test_what_a_site_leaves_out_is_not_read_and_does_not_apply(monkeypatch):
    run = Run(Options(rehearse=2, without=("bmc", "memory")))
    monkeypatch.setattr(run, "host_now", lambda name: pytest.fail(f"{name} is read"))
    machine = LiveMachine(run)
    left_out = Missing("left out by --fleet-without bmc", absent=True)
    assert machine.now("bmc") == machine.before("bmc") == left_out
    with pytest.raises(NotApplicable, match="not applicable: left out by --fleet-without memory"):
        of_host(machine.host.get, memory.MEMORY_ERRORS)
    assert run.own_machine.machine.host["memory_errors"] != machine.host["memory_errors"]  # evidence has what is known
    run.open_things.close()


# ---------------- facts that take more than one call, and programs that are asked
@pytest.mark.parametrize(
    ("asked", "file", "found"),
    [(None, "libnccl-net.so", True), (None, "libnccl-net-ofi.so", False), ("ofi", "libnccl-net-ofi.so", True),
     ("ofi", "libnccl-net.so", False), ("libmine.so", "libmine.so", True), ("none", "libnccl-net.so", False)],
)  # fmt: skip
def test_the_plugin_of_nccl_is_the_file_that_it_would_load(tmp_path, monkeypatch, asked, file, found):
    (tmp_path / file).touch()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"/nowhere:{tmp_path}")
    monkeypatch.delenv("NCCL_NET_PLUGIN", raising=False)
    monkeypatch.setattr(host, "output", lambda *command: "")
    if asked is not None:
        monkeypatch.setenv("NCCL_NET_PLUGIN", asked)
    assert host.read()["nccl_net_plugin"] == (str(tmp_path / file) if found else "none")


def test_a_library_in_the_loaders_cache_is_found_and_unknown_where_the_loader_does_not_answer(monkeypatch):
    cache = "2 libs found in cache\n\tlibnccl-net.so.0 (libc6,x86-64) => /a\n\tlibnccl-net.so (libc6,x86-64) => /b\n"

    monkeypatch.delenv("NCCL_NET_PLUGIN", raising=False)
    monkeypatch.setenv("LD_LIBRARY_PATH", "")
    monkeypatch.setattr(host, "output", lambda *command: cache)
    assert host.read(["nccl_net_plugin"]) == {"nccl_net_plugin": "/b"}
    monkeypatch.setattr(host, "output", Mock(side_effect=Unreadable("ldconfig did not answer within 20 s")))
    assert host.read(["nccl_net_plugin"]) == {"nccl_net_plugin": Missing("ldconfig did not answer within 20 s")}


@pytest.mark.parametrize(("command", "why"), [
    (("no-such-program", "-x"), "no-such-program is not installed"),
    (("sh", "-c", "echo first; echo no rights >&2; exit 3"), "sh failed with status 3: no rights"),
    (("sh", "-c", "exit 3"), "sh failed with status 3"),
    (("sleep", "60"), "sleep did not answer within 0.1 s"),
    (("/etc",), "/etc cannot be started: Permission denied"),
])  # fmt: skip
def test_why_nothing_is_printed_is_one_sentence(command, why):
    with pytest.raises(Unreadable) as failure:
        output(*command, seconds=0.1 if command[0] == "sleep" else 20)
    assert str(failure.value) == why


def test_what_a_program_prints_and_one_that_nobody_can_end_holds_nobody_up(monkeypatch):
    """As one does that the kernel keeps waiting for a drive."""
    kept = []
    monkeypatch.setattr(subprocess.Popen, "kill", lambda program: kept.append(program))
    monkeypatch.setattr(subprocess.Popen, "terminate", lambda program: None)
    monkeypatch.setattr(tools, "LAST_SECONDS", 0.1)
    monkeypatch.setattr(tools, "KILLED_SECONDS", 0.1)
    with pytest.raises(Unreadable, match=r"sleep did not answer within 0.1 s"):
        output("sleep", "1000", seconds=0.1)
    os.kill(kept[0].pid, signal.SIGKILL)
    kept[0].wait()
    assert output("sh", "-c", "echo $LC_ALL; echo noise >&2; exit 4", statuses=(0, 4)) == "C\n"


@pytest.mark.parametrize("error", [IndexError("index out of range"), TypeError("no number"), RecursionError()])
def test_a_reader_that_fails_ends_no_run(monkeypatch, error):
    monkeypatch.setitem(host.FACTS, "dmi", HostFact("dmi", str, Mock(side_effect=error)))
    found = host.read()
    assert (found["dmi"].absent, type(error).__name__ in found["dmi"].why) == (False, True)
    assert "bmc" not in found  # which is read when a check asks for it
