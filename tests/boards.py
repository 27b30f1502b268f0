"""GPUs that are not here: what NVML tells of them, and what their data sheets say.

The facts come from `nvidia-smi -q` and deviceQuery in public threads, and from the tables of white papers: T4
NVIDIA/nvidia-docker 1628; V100 NVIDIA/nvidia-docker 914; H200 awslabs/amazon-eks-ami 1985; RTX 4090 NVIDIA/nvbench 207;
B200 pytorch/ao 4002 (newer drivers tell 7,680 bits of its bus, older ones 8,192). The bus of an H200 is what driver
580.159.04 tells of one: 6,016 bits. The others: clocks, cores and bus
width of the data sheet or white paper of the board, where NVML's highest clocks are the boost clock and half the data
rate of the memory.
"""

from dataclasses import dataclass

from pytest_gpufleet.model.place import Gpu, GpuTopology

GEFORCE, TESLA, NVIDIA_RTX, NVIDIA = 5, 2, 13, 14


@dataclass(frozen=True)
class Board:
    """Facts by NVML. Of the data sheet: memory GB/s; TFLOP/s in 16 bits, dense, with sums in 32, and the clock in MHz
    that they hold at; GB/s of PCIe and of NVLink, in one direction."""

    name: str
    capability: tuple[int, int]
    cores: int
    bus: int
    memory_clock: int
    clock: int
    watts: int
    pcie: int
    memory: float
    tflops: float
    boost: int
    host: float
    links: int = 0
    nvlink: float = 0.0
    brand: int = NVIDIA

    def gpu(self, index=0, **facts):
        own = {
            "name": self.name, "compute_capability": list(self.capability), "brand": self.brand, "virtualization": 0,
            "cuda_cores": self.cores, "memory_bus_bits": self.bus, "memory_clock_max_mhz": self.memory_clock,
            "sm_clock_max_mhz": self.clock, "power_limit_watts": float(self.watts), "pcie_generation_max": self.pcie,
            "pcie_width_max": 16, "mig_mode": [0, 0],
        }  # fmt: skip
        return Gpu(index, {**own, **facts})

    def machine(self, count=8, fabric="", **facts):
        """So many of them, connected by NVSwitches if they have NVLinks, unless another fabric is given."""
        fabric = fabric or ("nvswitch" if self.links else "pcie")
        link = f"NV{self.links}" if fabric != "pcie" else "PHB"
        links = tuple(tuple("X" if i == j else link for j in range(count)) for i in range(count))
        return GpuTopology(tuple(self.gpu(index, **facts) for index in range(count)), links, fabric)


H200 = Board("NVIDIA H200", (9, 0), 16896, 6016, 3201, 1980, 700, 5, 4800, 989, 1830, 64, 18, 450)
PRO = "NVIDIA RTX PRO 6000 Blackwell"
BOARDS = {
    board.name: board
    for board in (
        Board("Tesla V100-SXM2-16GB", (7, 0), 5120, 4096, 877, 1530, 300, 3, 900, 125, 1530, 16, 6, 150, TESLA),
        Board("Tesla V100-SXM2-32GB", (7, 0), 5120, 4096, 877, 1530, 300, 3, 900, 125, 1530, 16, 6, 150, TESLA),
        Board("Tesla T4", (7, 5), 2560, 256, 5001, 1590, 70, 3, 320, 65, 1590, 16, brand=TESLA),
        Board("NVIDIA A100-SXM4-40GB", (8, 0), 6912, 5120, 1215, 1410, 400, 4, 1555, 312, 1410, 32, 12, 300),
        Board("NVIDIA A100-SXM4-80GB", (8, 0), 6912, 5120, 1593, 1410, 400, 4, 2039, 312, 1410, 32, 12, 300),
        Board("NVIDIA A100-PCIE-40GB", (8, 0), 6912, 5120, 1215, 1410, 250, 4, 1555, 312, 1410, 32, 12, 300),
        Board("NVIDIA A100 80GB PCIe", (8, 0), 6912, 5120, 1512, 1410, 300, 4, 1935, 312, 1410, 32, 12, 300),
        Board("NVIDIA A10", (8, 6), 9216, 384, 6251, 1695, 150, 4, 600, 125, 1695, 32),
        Board("NVIDIA A800-SXM4-80GB", (8, 0), 6912, 5120, 1593, 1410, 400, 4, 2039, 312, 1410, 32, 8, 200),
        Board("NVIDIA A40", (8, 6), 10752, 384, 7251, 1740, 300, 4, 696, 149.7, 1740, 32, 4, 56.25),
        Board("NVIDIA RTX A6000", (8, 6), 10752, 384, 8001, 2100, 300, 4, 768, 154.8, 1800, 32, 4, 56.25, NVIDIA_RTX),
        Board("NVIDIA GeForce RTX 3090", (8, 6), 10496, 384, 9751, 2100, 350, 4, 936, 71, 1695, 32, 4, 56.25, GEFORCE),
        Board("NVIDIA L4", (8, 9), 7424, 192, 6251, 2040, 72, 4, 300, 121, 2040, 32),
        Board("NVIDIA L40", (8, 9), 18176, 384, 9001, 2490, 300, 4, 864, 181, 2490, 32),
        Board("NVIDIA L40S", (8, 9), 18176, 384, 9001, 2520, 350, 4, 864, 362, 2520, 32),
        Board("NVIDIA GeForce RTX 4090", (8, 9), 16384, 384, 10501, 3105, 450, 4, 1008, 165.2, 2520, 32, brand=GEFORCE),
        Board(
            "NVIDIA GeForce RTX 5090", (12, 0), 21760, 512, 14001, 3090, 575, 5, 1792, 209.5, 2407, 64, brand=GEFORCE
        ),
        Board("NVIDIA H100 80GB HBM3", (9, 0), 16896, 5120, 2619, 1980, 700, 5, 3350, 989, 1830, 64, 18, 450),
        Board("NVIDIA H100 PCIe", (9, 0), 14592, 5120, 1593, 1755, 350, 5, 2039, 756, 1620, 64, 12, 300),
        Board("NVIDIA H100 NVL", (9, 0), 16896, 6144, 2619, 1785, 400, 5, 3938, 835, 1545, 64, 12, 300),
        Board("NVIDIA GH200 480GB", (9, 0), 16896, 6144, 2619, 1980, 900, 5, 4000, 989, 1830, 64),
        Board("NVIDIA H800", (9, 0), 16896, 5120, 2619, 1980, 700, 5, 3350, 989, 1830, 64, 8, 200),
        Board("NVIDIA H800 PCIe", (9, 0), 14592, 5120, 1593, 1755, 350, 5, 2039, 756, 1620, 64, 8, 200),
        Board("NVIDIA H20", (9, 0), 9984, 6144, 2619, 1980, 500, 5, 4000, 148, 1830, 64, 18, 450),
        Board("NVIDIA B200", (10, 0), 18944, 7680, 3996, 1965, 1000, 5, 7700, 2250, 1850, 64, 18, 900),
        Board("NVIDIA GB200", (10, 0), 19456, 8192, 3996, 2062, 1200, 5, 8000, 2500, 2007, 64, 18, 900),
        # PCIe 6, which counts as 5
        Board("NVIDIA B300 SXM6 AC", (10, 3), 18944, 8192, 3996, 2032, 1100, 6, 8000, 2250, 1856, 64, 18, 900),
        Board("NVIDIA GB300", (10, 3), 20480, 8192, 3996, 2070, 1400, 6, 8000, 2500, 1908, 64, 18, 900),
        Board("Tesla V100-PCIE-16GB", (7, 0), 5120, 4096, 877, 1380, 250, 3, 900, 112, 1370, 16, brand=TESLA),
        Board("Tesla V100-PCIE-32GB", (7, 0), 5120, 4096, 877, 1380, 250, 3, 900, 112, 1370, 16, brand=TESLA),
        Board(f"{PRO} Server Edition", (12, 0), 24064, 512, 12481, 2600, 600, 5, 1597, 500, 2600, 64),
        Board(f"{PRO} Max-Q Workstation Edition", (12, 0), 24064, 512, 14001, 2280, 300, 5, 1792, 438, 2280, 64),
        Board("Tesla P100-SXM2-16GB", (6, 0), 3584, 4096, 715, 1480, 300, 3, 732, 21.2, 1480, 16, 4, 80, TESLA),
        H200,
    )
}
