"""Which of the processes of all nodes this one is, by the variables that launchers set."""

import shutil
import socket

import msgspec
import pytest

from pytest_gpufleet.model import codec
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.suite import code
from pytest_gpufleet.nodes import launchers
from pytest_gpufleet.nodes.launchers import PORT, AgentSettings, Task, find, starts_several
from pytest_gpufleet.nodes.messages import DialIn
from pytest_gpufleet.run.cluster_run import take_part, transport_for
from pytest_gpufleet.run.settings import Options

TORCHRUN = {"GROUP_RANK": "3", "GROUP_WORLD_SIZE": "16", "RANK": "3", "WORLD_SIZE": "16", "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "gf0", "MASTER_PORT": "29500"}  # fmt: skip
OPEN_MPI = {"OMPI_COMM_WORLD_SIZE": "16", "OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
HYDRA = {"PMI_SIZE": "16", "PMI_RANK": "3", "MPI_LOCALNRANKS": "1"}
SRUN = {"SLURM_STEP_NODELIST": "gf[0-1],x7", "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_JOB_ID": "9",
        "SLURM_STEP_ID": "0", "SLURMD_NODENAME": "x7", "SLURM_STEP_TASKS_PER_NODE": "1(x3)", "SLURM_LOCALID": "0",
        "SLURM_NTASKS": "99", "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.99", "PMIX_RANK": "2"}  # fmt: skip
BATCH_SCRIPT = {"SLURM_NTASKS_PER_NODE": "8", "SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_LOCALID": "0",
                "SLURM_NTASKS": "16", "SLURM_NODELIST": "gf[0-1]", "SLURM_PROCID": "0"}  # fmt: skip
POD = {"JOB_COMPLETION_INDEX": "3", "NODE_NAME": "worker-7"}


@pytest.mark.parametrize(("environment", "head", "task"), [
    (SRUN, None, Task("srun", 2, 3, "gf0", PORT, "x7", ("gf0", "gf1", "x7"), "9.0")),
    (SRUN, "x7:5", Task("srun", 2, 3, "x7", 5, "x7", ("gf0", "gf1", "x7"), "9.0")),
    (TORCHRUN, None, Task("torchrun", 3, 16, "gf0", PORT)),
    (SRUN | TORCHRUN, None, Task("torchrun", 3, 16, "gf0", PORT)),  # one within the other
    ({"MASTER_ADDR": "gf0", "RANK": "3", "WORLD_SIZE": "16"}, None, Task("torchrun", 3, 16, "gf0", PORT)),
    (OPEN_MPI, "gf0", Task("mpirun", 3, 16, "gf0", PORT)),
    (SRUN | OPEN_MPI, "gf0", Task("mpirun", 3, 16, "gf0", PORT)),
    (HYDRA, "[fd00::1]:77", Task("mpirun", 3, 16, "fd00::1", 77)),
    ({"PMIX_RANK": "3", "PMIX_NAMESPACE": "a"}, "fd00::1", Task("PMIx", 3, None, "fd00::1", PORT, run="a")),
    (POD, "job-0.fleet", Task("Kubernetes", 3, None, "job-0.fleet", PORT, "worker-7")),
    ({"PSSH_NODENUM": "3", "PSSH_NUMNODES": "4"}, "192.0.2.1", Task("pssh", 3, 4, "192.0.2.1", PORT)),
    ({}, "192.0.2.1:1", Task("--fleet-head", None, None, "192.0.2.1", 1)),
    ({}, "127.0.0.1:1", Task("--fleet-head", 0, None, "127.0.0.1", 1)),  # which is this host
    ({}, None, None),
    (BATCH_SCRIPT, None, None),  # in which srun starts nothing
    (SRUN | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None, None),  # a shell, by srun --pty
    ({"MASTER_ADDR": "localhost", "RANK": "0", "WORLD_SIZE": "1"}, None, None),
])  # fmt: skip
def test_the_task_of_each_launcher(environment, head, task):
    assert find(environment, head) == task


def test_an_index_that_is_given_counts_more_and_the_first_pod_is_found_by_the_name_of_this_one():
    assert find(OPEN_MPI, "gf0", 0).index == 0
    assert find({}, "192.0.2.1", 5).index == 5
    names = {"job-3.fleet.ns.svc": "job-0.fleet.ns.svc", "a-b-3.c": "a-b-0.c", "job-3": "", "worker-7.cluster": ""}
    assert {name: launchers._first_pod(POD, lambda name=name: name) for name in names} == names


@pytest.mark.parametrize("environment", [OPEN_MPI, HYDRA, {"PMIX_RANK": "0"}])
def test_where_nobody_says_where_the_head_is_one_is_told_to(environment):
    with pytest.raises(Refused, match="--fleet-head HOST:PORT"):
        find(environment)


@pytest.mark.parametrize(("environment", "launcher"), [
    ({}, ""),
    (TORCHRUN, ""),
    ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "torchrun"),
    ({"WORLD_SIZE": "8", "RANK": "0"}, ""),  # of a training job's scheduler, which starts one process
    (OPEN_MPI, ""),
    ({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, "mpirun"),
    ({**HYDRA, "MPI_LOCALNRANKS": "8"}, "mpirun"),
    ({"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_LOCALID": "0"}, "srun"),
    ({"SLURM_STEP_TASKS_PER_NODE": "1(x2),2", "SLURM_LOCALID": "0"}, "srun"),
    ({"SLURM_LOCALID": "1"}, "srun"),
    (SRUN, ""),
    (BATCH_SCRIPT, ""),
])  # fmt: skip
def test_who_starts_a_process_for_each_gpu(environment, launcher):
    assert starts_several(environment) == launcher


def test_the_head_finds_an_address_that_is_not_loopback(monkeypatch):
    names = {"gf0": "127.0.1.1", "gf1": "10.99.0.11"}
    monkeypatch.setattr(
        socket, "getaddrinfo", lambda host, *_, **__: [(socket.AF_INET, socket.SOCK_DGRAM, 0, "", (names[host], 0))]
    )
    assert launchers.own_address("gf1", []) == "10.99.0.11"
    assert launchers.own_address("gf0", ["gf1"]) == "10.99.0.11"
    assert launchers.own_address("gf0", []) == "192.0.2.1"


@pytest.mark.parametrize(("index", "begin"), [(0, transport_for), (1, take_part)])
def test_several_hosts_without_a_secret_are_refused_on_each_with_how_to_make_one(index, begin):
    with pytest.raises(Refused, match="openssl rand -hex 32"):
        begin(Options(rehearse=1, nodes=2, head="127.0.0.1:1", index=index))


# ---------------------------------------------------------------- what makes an installation another one
OWN = DialIn("head", version="1", package="p", suite="s", python="3.12.3")


def other(name, **differs):
    return msgspec.structs.replace(OWN, name=name, **differs)


@pytest.mark.parametrize(("differs", "described"), [
    ({"python": "3.12.4"}, "gf1, gf2: Python 3.12.4."),
    ({"package": "q"}, "gf1, gf2: other files of pytest-gpufleet."),
    ({"package": "q", "version": "2"}, "gf1, gf2: pytest-gpufleet 2."),
    ({"suite": "t", "python": "3.13.0"}, "gf1, gf2: Python 3.13.0, other checks, conftest"),
    ({"suite": ""}, f"gf1, gf2: {launchers.NO_FOLDER}."),
    ({"suite": launchers.EMPTY}, f"gf1, gf2: {launchers.NO_CHECKS}."),
])  # fmt: skip
def test_nodes_with_another_installation_are_named_together_with_what_differs(differs, described):
    same = {"gf0": other("gf0"), "gf3": other("gf3", index=1)}
    launchers.refuse_others(OWN, same)
    with pytest.raises(Refused) as refused:
        launchers.refuse_others(OWN, {**same, "gf1": other("gf1", **differs), "gf2": other("gf2", **differs)})
    assert described in str(refused.value)
    assert not any(name in str(refused.value) for name in same)


def test_a_node_of_another_version_is_understood_so_far():
    sent = codec.packed({"is": "dial in", "name": "gf1", "version": "0.9", "python": "3.12.3", "new": 1})
    with pytest.raises(Refused, match=r"gf1: pytest-gpufleet 0\.9"):
        launchers.refuse_others(OWN, {"gf1": codec.unpacked(sent, DialIn)})


def test_what_this_process_has_is_of_its_package_and_of_the_suite_wherever_that_stands(folder, tmp_path_factory):
    own = launchers.own_install(AgentSettings(str(folder), suite=("checks",)))
    assert (own.package, own.suite) == (code(), launchers.suite(folder, ["checks"]))
    assert len(own.package) == 64
    other = tmp_path_factory.mktemp("other")
    (folder / "checks").rename(other / "checks")
    before = launchers.suite(other, ["checks"])
    (other / "checks").rename(folder / "checks")
    assert launchers.suite(folder, ["checks"]) == before


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "checks" / "inner").mkdir(parents=True)
    (tmp_path / "checks" / "test_a.py").write_text("a\n")
    (tmp_path / "checks" / "inner" / "conftest.py").write_text("b\n")
    return tmp_path


@pytest.mark.parametrize(("suite", "change", "another"), [
    ("checks", lambda at: (at / "checks/test_a.py").write_text("A\n"), True),
    ("checks", lambda at: (at / "checks/test_a.py").unlink(), True),
    ("checks", lambda at: (at / "checks/test_a.py").rename(at / "checks/test_b.py"), True),
    ("checks", lambda at: (at / "checks/inner/test_c.py").touch(), True),
    ("checks/test_a.py", lambda at: (at / "conftest.py").write_text("fixtures"), True),
    ("checks/test_a.py", lambda at: (at / "checks/conftest.py").write_text("fixtures"), True),
    ("test_none.py", lambda at: (at / "test_none.py").write_text("it is there now"), True),
    ("checks", lambda at: (at / "checks/notes.txt").write_text("to do"), False),
    ("checks", lambda at: shutil.copytree(at / "checks/inner", at / "checks/.venv"), False),
])  # fmt: skip
def test_files_that_pytest_looks_at_make_the_suite(folder, suite, change, another):
    before = launchers.suite(folder, [suite])
    change(folder)
    assert (launchers.suite(folder, [suite]) != before) is another
    assert launchers.suite(folder, [f"{suite}::test_it"]) == launchers.suite(folder, [suite])
    # An empty folder is another thing, and where there is no folder is no suite.
    assert launchers.suite(folder, ["nothing", "checks/test_d.py"]) == launchers.EMPTY
    assert (launchers.suite(folder / "none", []), bool(launchers.suite(folder, []))) == ("", True)
