"""`gpufleet calibrate`: profiles that are made of runs, and runs of which none is made."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from pytest_gpufleet.model.limit import Calibration
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.metric import Metric
from pytest_gpufleet.verdict import profile, toml_table
from pytest_gpufleet.verdict.profile import Profile
from tests import runs
from tests.commands.conftest import Command


@pytest.fixture
def calibrated(gpufleet: Command, tmp_path: Path) -> Callable[..., Profile]:
    """calibrated(*folders and options): the profile that is made of these runs."""

    def calibrate(*arguments: object) -> Profile:
        (path := tmp_path / "my.toml").unlink(missing_ok=True)
        assert gpufleet("calibrate", *arguments, "-o", path)[0] == 0
        return profile.load(path)

    return calibrate


def test_a_calibrated_profile_is_met_by_the_runs_it_comes_from(tmp_path: Path, gpufleet: Command) -> None:
    second = {"busbw world": 352.3, "collective_latency world": 32.9, "solo_train_throughput gpu3": 6100.0}
    folders = [
        runs.record(tmp_path / "a"),
        runs.record(tmp_path / 'b"\\', "node8", second, utc="2026-11-22T08:00:00+00:00"),
    ]
    path = tmp_path / "my.toml"
    status, text = gpufleet("calibrate", *folders, "-o", path)
    known_good = toml_table.read(path).values["calibrated_on"]
    assert [(each["run"], each["uuids"][0]) for each in known_good] == [("a", "GPU-node7-0"), ('b"\\', "GPU-node8-0")]
    assert (status, "3 limits for NVIDIA X9000" in text) == (0, True)
    written = {limit.metric: limit for limit in profile.load(path).limits}
    # Of two machines k is 49, so that the cap holds; where GPUs of one machine differ most, these tell more than two.
    assert {metric: (limit.sense, limit.value) for metric, limit in written.items()} == {
        "busbw": ("min", 338.3),  # (360 + 352.3) / 2 x 0.95 = 338.34, never rounded up
        "collective_latency": ("max", 33.77),  # (31.4159 + 32.9) / 2 x 1.05 = 33.766, never rounded down
        "solo_train_throughput": ("min", 5957.0),  # 6,187.5 - 5.8 x 40
    }
    # Limits of machines with an NVSwitch must not reject boards whose GPUs are linked directly.
    assert [limit.conditions.get("fabric") for limit in written.values()] == ["nvswitch", "nvswitch", None]
    busbw = written["busbw"]
    assert (busbw.grade, busbw.measured) == ("calibrated", 356.2)
    assert busbw.calibration == Calibration(2, 2, 8, s=5.445, k=49.28)
    assert busbw.source == (
        "4x NVIDIA X9000, node7, node8, 2026-11-21 to 2026-11-22, driver 580.159.04, NCCL 2.28.9, torch 2.11.0+cu130"
    )
    third = runs.record(tmp_path / "c", "node9", second)  # another machine that does as well
    page = tmp_path / "again.html"
    assert gpufleet("judge", third, "--fleet-profile", path, "-o", page)[0] == 0
    for text in ("mean 356.2 GB/s of 2 runs of 2 machines with 8 GPUs, s 5.445, k 49.28", "node8-S0, node8-S1"):
        assert text in page.read_text()
    first = path.read_text()
    path.unlink()
    gpufleet("calibrate", *folders, "-o", path)
    assert path.read_text() == first


def test_more_machines_that_agree_make_a_closer_limit(tmp_path: Path, calibrated: Callable[..., Profile]) -> None:
    folders = [runs.record(tmp_path / f"{n}", f"node{n}") for n in range(8)]
    made = [calibrated(*folders[:machines]) for machines in (1, 4, 8)]
    closer = [next(limit.value for limit in each.limits if limit.metric == "busbw") for each in made]
    assert closer == [342.0, 350.0, 353.8]  # 5 %, and 9.21 and 5.69 times 0.3 % below 360


def test_a_machine_that_calibrated_itself_is_not_accepted(tmp_path: Path, gpufleet: Command) -> None:
    folder, path, page = runs.record(tmp_path / "a"), tmp_path / "my.toml", tmp_path / "again.html"
    status, text = gpufleet("calibrate", folder, "-o", path)
    assert (status, "these limits come from 1 machine, which does not show how machines differ" in text) == (0, True)
    status, text = gpufleet("judge", folder, "--fleet-profile", path, "-o", page)
    assert (status, text.split()[0]) == (10, "INCOMPLETE")
    said = "come from this very machine: my.toml was calibrated on GPU 0 (serial node7-S0), GPU 1 (serial node7-S1)"
    assert said in text
    assert said in page.read_text().partition('id="fleet-gpus"')[0]

    status, text = gpufleet("calibrate", folder, "-o", path)
    assert (status, "my.toml is there already and is left as it is" in text) == (1, True)
    others = [runs.record(tmp_path / host, host, utc="2026-11-22T08:00:00+00:00") for host in ("node8", "node9")]
    _, text = gpufleet("calibrate", folder, *others, "-o", tmp_path / "all.toml")
    assert "these limits come from" not in text
    fresh = runs.record(tmp_path / "fresh", "node10")
    assert gpufleet("judge", fresh, "--fleet-profile", tmp_path / "all.toml")[0] == 0
    assert gpufleet("judge", others[1], "--fleet-profile", tmp_path / "all.toml")[0] == 10


def test_shipped_limits_stay_what_they_are_unless_replacing_them_is_asked_for(
    tmp_path: Path, calibrated: Callable[..., Profile]
) -> None:
    shipped = profile.for_gpu(runs.H200)
    alone = next(measurement for _, measurement, _ in runs.FIGURES if measurement.metric == "solo_train_throughput")
    limit = shipped.limit_for(alone).value

    def limits_of(folder: Path, *options: str) -> list[str]:
        written = calibrated(folder, *options)
        assert (written.match, written.base) == ((runs.H200,), shipped)
        return [limit.metric for limit in written.limits]

    def fast(by: float) -> Path:
        good = {"busbw world": 9000.0, **{f"solo_train_throughput {gpu}": limit * by for gpu in runs.GPUS}}
        return runs.record(tmp_path / f"{by}", values=good, machine=runs.topology("node7", runs.H200))

    fastest, faster = fast(1.2), fast(1.02)
    assert limits_of(fastest) == ["collective_latency"]
    assert limits_of(fastest, "--replace-shipped") == ["busbw", "collective_latency", "solo_train_throughput"]
    # 5 % below what was measured is less than what is asked already.
    assert limits_of(faster, "--replace-shipped") == ["busbw", "collective_latency"]


def test_a_figure_that_had_a_limit_gets_one_though_it_requires_none(
    tmp_path: Path, calibrated: Callable[..., Profile]
) -> None:
    small = runs.limit("busbw", "min", 10.0, "GB/s", 'bytes = "1 MiB"')
    limits = runs.written(tmp_path / "contract.toml", runs.contract() + small)
    written = calibrated(runs.record(tmp_path / "run", limits=limits))
    assert [limit.value for limit in written.limits if limit.metric == "busbw"] == [19.95, 342.0]


def test_the_margin_of_a_ratio_that_is_next_to_nothing_is_more_than_nothing(
    tmp_path: Path, calibrated: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    share = Measurement("communication_share", {"world": 0.004}, {"model": "resnet50", "recipe": "bf16", "ranks": 4})
    monkeypatch.setattr(runs, "FIGURES", (*runs.FIGURES, (runs.ALONE, share, True)))
    folder = runs.record(tmp_path / "run")
    assert calibrated(folder).limit_for(share).value == 0.1  # which is asked of every GPU
    assert calibrated(folder, "--replace-shipped").limit_for(share).value == pytest.approx(0.054, rel=1e-3)


def machines_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *gpus: tuple[float, ...]) -> list[Path]:
    """Runs of as many machines, whose GPUs have these figures of an author's own, which knows no peers."""
    own = Metric("decode_rate", "tokens/s", "higher", "decode rate")
    figure = Measurement(own.name, dict.fromkeys(runs.GPUS, 100.0), {}, definition=own)
    monkeypatch.setattr(runs, "FIGURES", ((runs.ALONE, figure, True),))
    return [
        runs.record(
            tmp_path / str(index), f"node{index}",
            {f"decode_rate {gpu}": value for gpu, value in zip(runs.GPUS, each, strict=True)},
        )
        for index, each in enumerate(gpus)
    ]  # fmt: skip


def test_no_limit_is_above_what_a_known_good_gpu_did(
    tmp_path: Path, calibrated: Callable[..., Profile], monkeypatch: pytest.MonkeyPatch
) -> None:
    (limit,) = calibrated(*machines_with(tmp_path, monkeypatch, *([(100.0, 98.0, 94.0, 88.0)] * 4))).limits
    assert (limit.value, limit.measured) == (88.0, 95.0)  # and not 5 % below the mean


def test_a_gpu_that_is_not_like_the_others_is_not_known_to_be_good(
    tmp_path: Path, gpufleet: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = machines_with(tmp_path, monkeypatch, *([(100.0, 100.5, 99.5, 100.0)] * 7), (100.0, 100.0, 93.0, 100.0))
    status, text = gpufleet("calibrate", *folders, "-o", tmp_path / "my.toml")
    assert status == 1
    assert "decode rate has a GPU too far from the mean of 99.78 tokens/s to be one of them" in text


@pytest.mark.parametrize(
    ("second", "said"),
    [
        ({"values": {"busbw world": 310.0}}, "differs by 15%: 360 GB/s in a, 310 GB/s in b"),
        ({"values": {"busbw world": math.nan}}, f"b was rejected: {runs.BANDWIDTH}[0], {runs.BANDWIDTH}[1] failed"),
        ({"values": {"solo_train_throughput gpu1": 5700.0}}, f"b was rejected: {runs.ALONE} failed"),
        ({"failed": {runs.ALONE: "other"}}, f"b was rejected: {runs.ALONE} failed"),
        ({"ends": False}, "b did not come to its end"),
        ({"host": "node7"}, "a and b are one and the same run"),
        ({"without": "test_2_health.py"}, "b did not show that its machine is sound: nothing of test_2_health.py ran"),
        ({"machine": runs.topology("node8", driver="575.57.08")}, "driver: 580.159.04 (a), 575.57.08 (b)"),
        ({"machine": runs.topology("node8", "NVIDIA B300")}, "GPU model: NVIDIA X9000 (a), NVIDIA B300 (b)"),
    ],
)
def test_no_profile_is_made_of_doubtful_runs(
    tmp_path: Path, gpufleet: Command, second: dict[str, object], said: str
) -> None:
    folders = [runs.record(tmp_path / "a"), runs.record(tmp_path / "b", **{"host": "node8", **second})]
    status, text = gpufleet("calibrate", *folders, "-o", tmp_path / "my.toml")
    assert status == 1
    assert said in text
    assert not (tmp_path / "my.toml").exists()
