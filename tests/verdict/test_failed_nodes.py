"""Which nodes failed, and why, as summary.json lists them, and what schedulers take: scontrol, a node condition, and
HealthEvents of NVSentinel."""

import json
import shlex

import jsonschema
import pytest

from pytest_gpufleet import cli
from pytest_gpufleet.model.endings import Refused
from pytest_gpufleet.model.events import FaultFound
from pytest_gpufleet.model.fault import Fault
from pytest_gpufleet.model.place import Pair, Place, gpu
from pytest_gpufleet.run import summary
from tests import clusters, runs
from tests.clusters import Ends, cluster
from tests.conftest import ROOT
from tests.edited_evidence import seal

SCHEMA = ROOT / "docs" / "summary.schema.json"
HOSTS = tuple(f"gf{number}" for number in range(10))
N1, N2 = (Place(number, "node") for number in (1, 2))


@pytest.fixture
def folder(tmp_path):
    """folder(*faults, ...): of a run on so many healthy nodes, between which these were found."""
    limits = clusters.limits(tmp_path / "contract.toml")

    def make(*faults, nodes=10, **how):
        more = [FaultFound(fault=fault) for fault in faults]
        return cluster(tmp_path / "run", limits, hosts=HOSTS[:nodes], wanted=nodes, more=more, **how)

    return make


@pytest.fixture
def names(folder):
    """names(...): the failed nodes of such a run, by its summary, with what failed."""

    def named(*faults, **how):
        document = json.loads((folder(*faults, nodes=4, **how) / "summary.json").read_text())
        jsonschema.validate(document, json.loads(SCHEMA.read_text()))
        return {each["host"]: [why["name"] for why in each["reasons"]] for each in document["failed_nodes"]}

    return named


SLOW = {"solo_train_throughput gpu1": 100.0}


@pytest.mark.parametrize(("faults", "how", "expected"), [
    ((), {}, {}),
    ((), {"other": {2: SLOW}}, {"gf2": ["limit_missed"]}),
    ((), {"other": {2: SLOW}, "ends": Ends(not_here=(2,))}, {"gf2": ["check_failed"]}),
    ((), {"ends": Ends(lost={3: "silent for 10 s"})}, {"gf3": ["node_lost"]}),
    ((), {"ends": Ends(died=(3,))}, {}),  # INCOMPLETE
    ((Fault("node_slow", (N1,), "slow"), Fault("node_slow", (N1,), "slow")), {}, {"gf1": ["node_slow"]}),
    ((Fault("rank_died", (gpu(2, node=3),), "SIGKILL"),), {}, {"gf3": ["rank_died"]}),
    ((Fault("node_link_slow", (Pair(N1, N2),), "slow"),), {}, {}),  # neither end
    ((Fault("rank_hung", tuple(Place(number, "node") for number in range(4)), "all"),), {}, {}),
    ((Fault("limit_missed", (N1,), "a rail of it, measured with one partner"),), {}, {}),
    (  # what explains it is to be mended first, and alone counts
        (Fault("harmful_variable", (N2,), "NCCL_IB_DISABLE=1"), Fault("node_slow", (N2,), "slow")),
        {}, {"gf2": ["harmful_variable"]},
    ),
])  # fmt: skip
def test_a_node_failed_that_is_rejected_lost_or_named_alone(names, faults, how, expected):
    assert names(*faults, **how) == expected


def test_one_machine_is_its_own_failed_node_with_the_gpus_to_blame(tmp_path):
    folder = seal(runs.record(tmp_path / "run", values=SLOW, limits=runs.written(tmp_path / "limits.toml")))
    (failed,) = json.loads((folder / "summary.json").read_text())["failed_nodes"]
    (why,) = failed["reasons"]
    assert (failed["host"], why["code"], why["action"], why["gpus"]) == ("node7", 401, "TRIAGE", ["GPU-node7-1"])


# ---------------------------------------------------------------- run again
def test_what_failed_runs_again_with_two_good_nodes_one_of_them_the_head(folder):
    run = folder(other={2: SLOW}, ends=Ends(died=(3,)))
    for own, good in (("", ("gf0", "gf1")), ("gf5.example", ("gf5", "gf0")), ("gf2", ("gf0", "gf1"))):
        assert summary.to_run_again(run, own) == ("gf2", *good)
    for other in ("gf3", "elsewhere"):  # INCOMPLETE, and none of that run
        with pytest.raises(Refused, match=f"{other}, the head, neither failed nor was good"):
            summary.to_run_again(run, other)


@pytest.mark.parametrize(
    ("other", "why"), [({}, "no node failed"), (dict.fromkeys(range(4), SLOW), "no node was good")]
)
def test_nothing_to_run_again(folder, other, why):
    with pytest.raises(Refused, match=why):
        summary.to_run_again(folder(other=other, nodes=4))


# ---------------------------------------------------------------- what schedulers take
@pytest.fixture
def printed(capsys):
    def fleet(*arguments):
        return (cli.main(["fleet", *map(str, arguments)]), *capsys.readouterr())

    return fleet


def test_slurm_drains_who_failed_with_codes(folder, printed):
    status, out, _ = printed(folder(other={2: SLOW}, ends=Ends(died=(3,))), "--as", "slurm")
    assert status == 1
    reason = "Reason=gpufleet REJECTED: 401 limit_missed"
    assert shlex.split(out) == ["scontrol", "update", "NodeName=gf2", "State=DRAIN", reason]


def test_no_run_drains_more_than_its_share(folder, printed):
    run = folder(other={2: SLOW, 5: SLOW})
    for form in ("slurm", "node-condition", "healthevent"):
        status, out, err = printed(run, "--as", form)
        assert (status, out, "2 of 10 nodes failed" in err, "--drain-at-most 2" in err) == (1, "", True, True)
        for share in ("2", "20%"):
            _, out, err = printed(run, "--as", form, "--drain-at-most", share)
            assert ("gf2" in out, "gf5" in out, err) == (True, True, "")


def test_a_name_that_would_be_a_command_is_not_printed(tmp_path, printed):
    limits = runs.written(tmp_path / "limits.toml")
    _, out, err = printed(runs.record(tmp_path / "run", "n;reboot", SLOW, limits), "--as", "slurm")
    assert (out, "'n;reboot' is no name of a host" in err) == ("", True)


def test_conditions_of_good_nodes_are_taken_back(folder, printed, tmp_path):
    """A node is called as the site calls it."""
    (hosts := tmp_path / "hosts.txt").write_text("gf[0-9].cluster.example\n")
    _, out, _ = printed(folder(other={2: SLOW}, ends=Ends(died=(3,))), "--as", "node-condition", "--expect", hosts)
    words = [shlex.split(line) for line in out.splitlines()]
    assert {tuple(each[:3]) + tuple(each[4:6]) for each in words} == {
        ("kubectl", "patch", "node", "--subresource=status", "--type=strategic")
    }
    patches = {each[3]: json.loads(each[6].removeprefix("--patch=")) for each in words}
    states = {name: patch["status"]["conditions"][0] for name, patch in patches.items()}
    assert len(states) == 9  # nothing is known of gf3
    bad = states["gf2.cluster.example"]
    assert (bad["type"], bad["status"], bad["reason"]) == ("GpufleetRejected", "True", "LimitMissed")
    assert {each["status"] for name, each in states.items() if "gf2" not in name} == {"False"}


# Fields and types, as JSON has them, of data-models/protobufs/health_event.proto of github.com/NVIDIA/NVSentinel at
# commit 264bfab85e3c490468f9239858fa52bb6b977e3f.
TEXT, YES = {"type": "string"}, {"type": "boolean"}
ENTITY = {"entityType": TEXT, "entityValue": TEXT}
EVENT = {
    "version": {"const": 1}, "agent": TEXT, "componentClass": TEXT, "checkName": TEXT, "isFatal": YES, "isHealthy": YES,
    "message": TEXT, "recommendedAction": {"enum": ["NONE", "CONTACT_SUPPORT"]}, "nodeName": TEXT,
    "errorCode": {"type": "array", "items": TEXT},
    "entitiesImpacted": {"type": "array", "items": {"properties": ENTITY, "additionalProperties": False}},
    "generatedTimestamp": {"pattern": r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$"},
    "processingStrategy": {"const": "EXECUTE_REMEDIATION"},
}  # fmt: skip


def test_nvsentinel_can_read_its_events(folder, printed):
    _, out, _ = printed(folder(other={2: SLOW}), "--as", "healthevent")
    document = json.loads(out)
    assert (document.pop("version"), [*document]) == (1, ["events"])
    jsonschema.validate(document["events"], {"items": {"properties": EVENT, "additionalProperties": False}})
    assert len(document["events"]) == 10
    (bad,) = (each for each in document["events"] if each["isFatal"])
    assert (bad["nodeName"], bad["isHealthy"], bad["errorCode"]) == ("gf2", False, ["gpufleet/401"])
    impacted = [(each["entityType"], each["entityValue"]) for each in bad["entitiesImpacted"]]
    assert impacted == [("v1/Node", "gf2"), ("GPU_UUID", "GPU-gf2-1")]
    good = [each for each in document["events"] if each is not bad]
    assert all(each["isHealthy"] and each["recommendedAction"] == "NONE" for each in good)
