"""What a GPU can do at best, the share of it that training makes use of, and figures that no GPU can reach."""

import pytest

from pytest_gpufleet.model.gpu import Missing
from pytest_gpufleet.model.measurement import Measurement
from pytest_gpufleet.model.place import WORLD
from pytest_gpufleet.verdict import peaks
from tests.boards import BOARDS, H200, Board

WITHIN = 0.03
DATA_SHEETS = [board for board in BOARDS.values() if board.name != "NVIDIA GB200"]  # has two clocks, and C2C for PCIe


@pytest.mark.parametrize("board", DATA_SHEETS, ids=lambda board: board.name)
def test_peaks_are_those_of_the_data_sheet(board: Board) -> None:
    at_boost = board.gpu(sm_clock_max_mhz=board.boost)
    assert peaks.memory_bandwidth(at_boost).value == pytest.approx(board.memory, rel=WITHIN)
    assert peaks.host_link(at_boost).value == pytest.approx(board.host, rel=WITHIN)
    assert peaks.product_rate(at_boost).value == pytest.approx(board.tflops, rel=WITHIN)
    if board.links:
        assert peaks.nvlinks(at_boost, board.links).value == pytest.approx(board.nvlink, rel=WITHIN)


def test_board_classes_of_one_architecture_compute_at_their_own_rate() -> None:
    rates = {
        name: round(peaks.product_rate(board.gpu(sm_clock_max_mhz=1000)).value / (board.cores / 1000), 1)
        for name, board in BOARDS.items()
        if board.capability in ((8, 6), (9, 0))
    }
    assert rates["NVIDIA A10"] == rates["NVIDIA RTX A6000"] == 2 * rates["NVIDIA GeForce RTX 3090"]
    assert rates["NVIDIA H200"] == rates["NVIDIA H100 PCIe"] > 3.9 * rates["NVIDIA H20"]


def test_a_peak_says_how_it_comes_about() -> None:
    gpu = H200.gpu()
    assert str(peaks.memory_bandwidth(gpu)) == "3,201 MHz x 2 x 6,016 bits: 4,814 GB/s"
    assert str(peaks.product_rate(gpu)) == "132 SMs x 1,980 MHz x 4,096 operations (H100 white paper): 1,071 TFLOP/s"
    assert str(peaks.nvlinks(gpu, 18)) == "18 NVLinks x 25 GB/s: 450 GB/s"
    assert str(peaks.Peak(12_938.4, "images/s", "2 x 6,469 images/s")) == "2 x 6,469 images/s: 12,940 images/s"


FOLLOWS = {
    peaks.memory_bandwidth: ("memory_bus_bits", "memory_clock_max_mhz"),
    peaks.host_link: ("pcie_generation_max", "pcie_width_max"),
    peaks.product_rate: ("compute_capability", "cuda_cores", "sm_clock_max_mhz"),
    peaks.power_bound: ("power_limit_watts",),
}


@pytest.mark.parametrize(("peak", "fact"), [(peak, fact) for peak, facts in FOLLOWS.items() for fact in facts])
def test_a_fact_that_the_driver_does_not_give_is_not_guessed(peak, fact: str) -> None:  # type: ignore[no-untyped-def]
    for untold in (Missing("NVML: Not Supported", absent=True), 0):
        with pytest.raises(peaks.NoPeak, match=f"does not give {fact} of GPU 0"):
            peak(H200.gpu(**{fact: untold}))


def test_the_brand_is_asked_for_where_it_decides() -> None:
    ada, hopper = BOARDS["NVIDIA L40S"], BOARDS["NVIDIA H200"]
    with pytest.raises(peaks.NoPeak, match="brand"):
        peaks.product_rate(ada.gpu(brand=Missing("NVML: Not Supported", absent=True)))
    assert peaks.product_rate(hopper.gpu(brand=0))


@pytest.mark.parametrize(("facts", "why"), [
    ({"mig_mode": [1, 1]}, "cut by MIG"),
    ({"virtualization": 2}, "a virtual one"),
    ({"compute_capability": [99, 0]}, "nobody has looked up the matrix products of compute capability 99.0"),
])  # fmt: skip
def test_parts_of_gpus_and_what_nobody_has_looked_up_have_no_peak(facts: dict[str, object], why: str) -> None:
    with pytest.raises(peaks.NoPeak, match=why):
        peaks.product_rate(H200.gpu(**facts))


def test_a_virtual_machine_that_does_not_see_the_slot_asks_for_what_the_link_runs_at() -> None:
    """A GPU that could do PCIe 5 in a host that cannot is healthy; otherwise it is whole."""
    assert peaks.product_rate(H200.gpu(virtualization=1)) == peaks.product_rate(H200.gpu())
    in_slow_host = H200.gpu(virtualization=1, pcie_generation=4, pcie_width=16)
    assert peaks.host_link(in_slow_host).formula == "PCIe 4 x 16 lanes"
    saves_power = H200.gpu(virtualization=1, pcie_generation=1, pcie_width=16)
    assert peaks.host_link(saves_power).formula == "PCIe 3 x 16 lanes"
    with pytest.raises(peaks.NoPeak, match="PCIe of generation 1"):
        peaks.host_link(H200.gpu(pcie_generation_max=1))


# ----------------------------------------------------------------

FLOP = 4.2e9


BOARD = H200.machine(4)


def tokens(values):
    return Measurement("token_throughput", values, {"recipe": "bf16"})


def at(share):
    """Tokens/s of one GPU that makes use of such a share of its peak."""
    return share * peaks.product_rate(BOARD.gpus[0]).value * 1e12 / FLOP


def test_it_is_the_share_of_the_peak_of_the_gpus_that_train():
    places = [gpu.place for gpu in BOARD.gpus]
    (alone,) = peaks.model_flops_utilization(tokens({place: at(0.5) for place in places}), FLOP, BOARD)
    assert [*alone.values] == places
    assert [*alone.values.values()] == pytest.approx([0.5] * 4)
    (together,) = peaks.model_flops_utilization(tokens({WORLD: 4 * at(0.4)}), FLOP, BOARD)
    assert together.values[WORLD] == pytest.approx(0.4)
    assert peaks.model_flops_utilization(tokens({"cpu0": 1000.0}), FLOP, BOARD) == []  # no peak is known
    half = peaks.product_rate(BOARD.gpus[0]).value / 2
    (published,) = peaks.model_flops_utilization(tokens({WORLD: 4 * at(0.4)}), FLOP, BOARD, half)
    assert published.details["by the data sheet"].startswith("80.0%")


def test_what_no_gpu_can_reach_is_a_fault_of_that_place():
    places = [gpu.place for gpu in BOARD.gpus]
    rates = dict.fromkeys(places, at(0.99)) | {places[2]: at(1.01)}
    (fault,) = peaks.above_peak(tokens(rates), FLOP, BOARD)
    assert (fault.name, fault.subjects) == ("implausible_value", (places[2],))
