"""Profiles: what is refused and how it is said, which limit decides, whether shipped figures make sense."""

import re

import pytest

from pytest_gpufleet.probes.reading import METRICS, GiB, KiB, MiB
from pytest_gpufleet.verdict.measurement import Measurement
from pytest_gpufleet.verdict.profile import ProfileError, for_gpu, load, shipped

HEAD = 'name = "Card"\nmatch = ["NVIDIA Card"]\n'
PEAKS = {"fp32": "peak_tflops_fp32", "tf32": "peak_tflops_tf32", "amp": "peak_tflops_fp16"}
LIMIT = """
[[limit]]
metric = "busbw"
min = 100
unit = "GB/s"
kind = "published gate"
source = "somebody"
"""
MODELS = (
    "Tesla V100-SXM2-16GB",
    "Tesla V100-SXM2-32GB",
    "Tesla T4",
    "NVIDIA A100-SXM4-40GB",
    "NVIDIA A100-SXM4-80GB",
    "NVIDIA H100 80GB HBM3",
    "NVIDIA H200",
    "NVIDIA GeForce RTX 3090",
    "NVIDIA GeForce RTX 4090",
)


def write(tmp_path, text):
    path = tmp_path / "card.toml"
    path.write_text(text, encoding="utf-8")
    return path


def limit(old="", new="", when=""):
    """The text of a limit, with one thing changed."""
    assert old in LIMIT
    return LIMIT.replace(old, new, 1) + (f"when = {{ {when} }}\n" if when else "")


def busbw(**conditions):
    return Measurement("busbw", {"world": 1.0}, conditions)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("name = x\n", ["valid TOML", "line 1"]),
        ("match = ['x']", ['"name"', "missing"]),
        ("name = ' '\nmatch = ['x']", ['"name"', "empty"]),
        ("name = 'x'", ['"match"', "NVML"]),
        ("name = 'x'\nmatch = 'NVIDIA H200'", ['"match"', "list"]),
        ("name = 'x'\nmatch = []", ['"match"', "list"]),
        (HEAD + "facs = {}", ['"facs"', 'did you mean "facts"?']),
        (HEAD + "colour = 'red'", ['"colour"', "write name or match"]),
        (HEAD + "facts = 3", ['"facts"', "table"]),
        (HEAD + "[facts]\npower_wats = 3", ["[facts]", 'did you mean "power_watts"?']),
        (HEAD + "[facts]\npower_watts = 'much'", ["[facts]", '"power_watts"', "number"]),
        (HEAD + "[facts]\npower_watts = nan", ["[facts]", '"power_watts"', "number"]),
        (HEAD + "[limit]\nmin = 3", ['"limit"', "[[limit]]"]),
        (HEAD + "limit = [1]", ['"limit"', "[[limit]]"]),
        (HEAD + "limit = [{ metric = 'buzbw' }]", ["limit 1:", 'did you mean "busbw"?']),
        (HEAD + limit("metric", "metrik"), ["limit 1 (line 4)", 'did you mean "metric"?']),
        (HEAD + limit('"busbw"', '"busbv"'), ['"metric"', 'did you mean "busbw"?']),
        (HEAD + limit('"busbw"', "3"), ['"metric"', "text"]),
        (HEAD + limit("min = 100\n"), ['"min"', "missing"]),
        (HEAD + limit("min", "max"), ['"max"', "higher is better", 'write only "min"']),
        (HEAD + limit("min = 100", "min = 100\nmax = 200"), ['"max"', 'write only "min"']),
        (HEAD + limit("100", "0"), ['"min"', "positive", "not 0"]),
        (HEAD + limit("100", "-1.5"), ['"min"', "positive", "not -1.5"]),
        (HEAD + limit("100", "inf"), ['"min"', "positive", "not inf"]),
        (HEAD + limit("100", "nan"), ['"min"', "positive", "not nan"]),
        (HEAD + limit("100", "1" + "0" * 400), ['"min"', "positive"]),
        (HEAD + limit("100", "true"), ['"min"', "positive", "not True"]),
        (HEAD + limit("100", "'100'"), ['"min"', "positive", "not '100'"]),
        (HEAD + limit('"GB/s"', '"Gb/s"'), ['"unit"', '"Gb/s"', 'did you mean "GB/s"?']),
        (HEAD + limit('"GB/s"', '"images"'), ['"unit"', "write GB/s"]),
        (HEAD + limit('unit = "GB/s"\n'), ['"unit"', "missing"]),
        (HEAD + limit("published gate", "publishd gate"), ['"kind"', 'did you mean "published gate"?']),
        (HEAD + limit('kind = "published gate"\n'), ['"kind"', "missing"]),
        (HEAD + limit('source = "somebody"\n'), ['"source"', "missing"]),
        (HEAD + limit("somebody", "  "), ['"source"', "empty"]),
        (HEAD + limit() + "when = 8\n", ['"when"', "table"]),
        (HEAD + limit(when="rank = 8"), ['"when"', 'did you mean "ranks"?']),
        (HEAD + limit(when="ranks = true"), ['"ranks"', "positive whole number", "not True"]),
        (HEAD + limit(when="ranks = 8.0"), ['"ranks"', "positive whole number"]),
        (HEAD + limit(when="ranks = 0"), ['"ranks"', "positive whole number"]),
        (HEAD + limit(when="nvls = 1"), ['"nvls"', "true or false"]),
        (HEAD + limit(when="collective = 'allreduce'"), ['"collective"', 'did you mean "all_reduce"?']),
        (HEAD + limit(when="dtype = 'fp32'"), ['"dtype"', '"fp32"']),
        (HEAD + limit(when="model = 'resnet18'"), ['"model"', 'did you mean "resnet50"?']),
        (HEAD + limit(when="recipe = 'tf23'"), ['"recipe"', 'did you mean "tf32"?']),
        (HEAD + limit(when="bytes = '8 GB'"), ['"bytes"', "KiB, MiB or GiB", '"8 GB"']),
        (HEAD + limit(when="bytes = '0.5 GiB'"), ['"bytes"', "KiB, MiB or GiB"]),
        (HEAD + limit(when="bytes = '0 GiB'"), ['"bytes"', "positive"]),
        (HEAD + limit(when="bytes = -8"), ['"bytes"', "positive"]),
        (HEAD + limit() + limit("min", "max"), ["limit 2 (line 11)", '"max"']),
        (HEAD + limit() + limit(), ["limit 1 (line 4)", "limit 2 (line 11)", "busbw", '"when"']),
        (
            HEAD + limit(when="ranks = 8, nvls = true") + limit(when="ranks = 8, bytes = 8"),
            ["limit 1 (line 4)", "limit 2 (line 12)", "neither is more specific"],
        ),
    ],
)
def test_a_bad_profile_is_refused_in_one_sentence(tmp_path, text, words):
    path = write(tmp_path, text)
    with pytest.raises(ProfileError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}: ")
    assert message[-1] in ".?"
    assert "\n" not in message
    for word in words:
        assert word in message


def test_a_ratio_is_no_percentage(tmp_path):
    text = limit('"busbw"', '"scaling_efficiency"').replace('"GB/s"', '"ratio"').replace("100", "95")
    with pytest.raises(ProfileError, match=r"limit 1 .* ratio from 0 to 1, not 95"):
        load(write(tmp_path, HEAD + text))


def test_a_file_that_is_not_there_or_not_text(tmp_path):
    with pytest.raises(ProfileError, match=r"none\.toml: cannot be read \(No such file or directory\)"):
        load(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match=r"binary\.toml: is not valid TOML"):
        load(tmp_path / "binary.toml")


def test_what_is_read_is_what_was_written(tmp_path):
    text = HEAD + "[facts]\nnvlinks = 0\npower_watts = 70.5\n" + limit(when="bytes = '8 GiB', nvls = false")
    profile = load(write(tmp_path, text))
    assert (profile.name, profile.match) == ("Card", ("NVIDIA Card",))
    assert profile.facts == {"nvlinks": 0, "power_watts": 70.5}
    assert profile.path == tmp_path / "card.toml"
    (only,) = profile.limits
    assert (only.metric, only.sense, only.value, only.unit) == ("busbw", "min", 100.0, "GB/s")
    assert (only.kind, only.source, only.profile) == ("published gate", "somebody", "card.toml")
    assert only.conditions == {"bytes": 8 * GiB, "nvls": False}


@pytest.mark.parametrize(
    ("written", "count"),
    [("'8 GiB'", 8 * GiB), ("'64MiB'", 64 * MiB), ("'32 KiB'", 32 * KiB), ("1024", KiB)],
)
def test_bytes_may_be_written_in_binary_units(tmp_path, written, count):
    profile = load(write(tmp_path, HEAD + limit(when=f"bytes = {written}")))
    assert profile.limit_for(busbw(bytes=count)) is profile.limits[0]
    assert profile.limit_for(busbw(bytes=count + 1)) is None


def test_the_most_specific_limit_wins(tmp_path):
    text = HEAD + limit(when="ranks = 8, nvls = true") + limit() + limit(when="ranks = 8")
    both, always, eight = (profile := load(write(tmp_path, text))).limits
    assert profile.limit_for(busbw(ranks=8, nvls=True)) is both
    assert profile.limit_for(busbw(ranks=8, nvls=False)) is eight
    assert profile.limit_for(busbw(ranks=8)) is eight
    assert profile.limit_for(busbw(ranks=4, nvls=True)) is always
    assert profile.limit_for(busbw()) is always
    assert profile.limit_for(Measurement("train_throughput", {"world": 1.0}, {"ranks": 8})) is None


def test_a_condition_that_was_not_measured_does_not_hold(tmp_path):
    profile = load(write(tmp_path, HEAD + limit(when="nvls = false")))
    assert profile.limit_for(busbw(ranks=8)) is None


def test_limits_that_cannot_both_hold_may_be_equally_specific(tmp_path):
    text = HEAD + limit(when="ranks = 8, nvls = true") + limit(when="ranks = 8, nvls = false")
    assert len(load(write(tmp_path, text)).limits) == 2


# The shipped profiles.


@pytest.mark.parametrize("model", MODELS)
def test_every_promised_model_has_a_profile(model):
    profile = for_gpu(model)
    assert profile is not None
    assert model in profile.match


@pytest.mark.parametrize("model", ["NVIDIA H100 NVL", "NVIDIA H100", "nvidia h200", ""])
def test_a_profile_is_found_by_the_exact_name_only(model):
    assert for_gpu(model) is None


def test_no_two_profiles_claim_one_model():
    names = [name for profile in shipped() for name in profile.match]
    assert sorted(names) == sorted(set(names))
    assert len({profile.name for profile in shipped()}) == len(shipped())


def shipped_limits(*metrics):
    return [
        pytest.param(
            profile,
            one,
            id=f"{profile.path.stem}-{'-'.join(map(str, (one.metric, *one.conditions.values())))}",
        )
        for profile in shipped()
        for one in profile.limits
        if one.metric in (metrics or METRICS)
    ]


@pytest.mark.parametrize(("profile", "one"), shipped_limits())
def test_a_shipped_limit_names_its_source_and_the_figure_it_comes_from(profile, one):
    assert one.source.strip()
    assert one.profile == profile.path.name
    assert one.conditions["ranks"] >= 1
    if one.kind == "0.90 x published measurement":
        # The first number after the source's last colon is the lowest that was published.
        figure = float(re.findall(r": (\d[\d,]*(?:\.\d+)?)", one.source)[-1].rstrip(",").replace(",", ""))
        assert one.value == pytest.approx(0.9 * figure, rel=0.005)


@pytest.mark.parametrize(("profile", "one"), shipped_limits("busbw"))
def test_no_bandwidth_floor_is_above_what_the_links_can_carry(profile, one):
    # Without these three a floor for gigabytes would meet a message of eight bytes.
    assert {"collective", "bytes", "ranks"} <= one.conditions.keys()
    link, ranks = profile.facts["nvlink_gigabytes_per_second"], one.conditions["ranks"]
    # With NVLS a GPU sends 1 + 1/n of the message instead of 2(n-1)/n, which is what busbw counts.
    nvls_gain = 2 * (ranks - 1) / (ranks + 1) if one.conditions.get("nvls") else 1
    assert one.value <= link * nvls_gain


def test_on_hopper_an_all_reduce_limit_knows_about_nvls():
    for model in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        on, off = (
            for_gpu(model).limit_for(busbw(collective="all_reduce", bytes=8 * GiB, dtype="float32", ranks=8, nvls=nvls))
            for nvls in (True, False)
        )
        assert on.value > 1.2 * off.value
        assert all(
            "nvls" in one.conditions
            for one in for_gpu(model).limits
            if one.conditions.get("collective") == "all_reduce"
        )


@pytest.mark.parametrize("nvls", [True, False])
@pytest.mark.parametrize("nbytes", [64 * MiB, GiB, 8 * GiB])
@pytest.mark.parametrize(
    "collective",
    ["all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all", "sendrecv"],
)
def test_the_h200_has_a_limit_for_every_collective(collective, nbytes, nvls):
    measured = busbw(collective=collective, bytes=nbytes, dtype="float32", ranks=8, nvls=nvls)
    assert for_gpu("NVIDIA H200").limit_for(measured) is not None


@pytest.mark.parametrize(("profile", "one"), shipped_limits("train_throughput", "solo_train_throughput"))
def test_no_training_floor_is_absurd(profile, one):
    each = one.value / one.conditions["ranks"]
    assert each > 100  # the slowest card here is published at 369
    peak = profile.facts.get(PEAKS[one.conditions["recipe"]])
    assert peak is None or each * 24.3e9 < 0.6 * peak * 1e12  # 24.3 GFLOP an image, forward and backward
    if one.conditions["ranks"] > 1:
        alone = profile.limit_for(
            Measurement("train_throughput", {"world": 1.0}, {**one.conditions, "ranks": 1, "batch": 256})
        )
        assert each < 1.05 * alone.value


@pytest.mark.parametrize(("profile", "one"), shipped_limits("scaling_efficiency"))
def test_scaling_efficiency_is_asked_for_all_recipes(profile, one):
    for recipe in ("fp32", "tf32", "amp"):
        measured = {"model": "resnet50", "recipe": recipe, "ranks": 8, "batch": 256}
        assert profile.limit_for(Measurement("scaling_efficiency", {"world": 1.0}, measured)) is one
