"""Thirteen kinds of node as Linux shows them below /sys, written into a folder from compact tables.

Numbering, caches and distances are those that users of such nodes have published, from numactl -H, lscpu and
lstopo: ARCHER2 and MeluXina (Zen 2, NPS4), a Sapphire Rapids with SNC4, whose third-level cache spans four
regions, GH200 (nine NUMA nodes, one with CPUs), Fugaku (CPUs 0, 1 and 12 to 59), an AC922 (Power9), and an
i7-12700H.
"""

import atexit
import shutil
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from pathlib import Path

MIB = 1024  # KiB


@dataclass(frozen=True)
class Core:
    """A core: its CPUs (hardware threads), and where it lies. None: the kernel does not say."""

    cpus: tuple[int, ...]
    socket: int = 0
    region: int | None = 0
    l3: int | None = 0  # cores with the same number share a third-level cache
    id: int = 0  # core_id, which is unique neither on a node nor, with clusters, on a socket
    cluster: int | None = None
    l2: int | None = None  # likewise; None: a cache of its own
    khz: int = 0
    capacity: int = 0


@dataclass(frozen=True)
class Seen:
    """The node as a person counts it: of what is online, with regions that have CPUs."""

    cpus: int
    cores: int
    sockets: int
    regions: int
    l3: int


@dataclass(frozen=True)
class Tree:
    """A node. `regions` are those with memory alone; `memory` is that of each region, in MiB."""

    cores: Sequence[Core]
    seen: Seen
    l2_kib: int = 0  # 0: caches are not shown
    l3_kib: int = 0
    memory: int = 0
    distances: Sequence[Sequence[int]] = ()
    regions: Sequence[int] = ()
    kinds: Mapping[str, str] = field(default_factory=dict)  # "cpu_core" → its CPUs
    offline: frozenset[int] = frozenset()
    allowed: frozenset[int] | None = None  # to a process there; None: all that are online
    quota: str = ""  # cpu.max of its control group

    @property
    def online(self) -> frozenset[int]:
        return frozenset(cpu for core in self.cores for cpu in core.cpus) - self.offline

    @property
    def affinity(self) -> frozenset[int]:
        return self.online if self.allowed is None else self.allowed

    def write(self, root: Path) -> Path:
        """Write it as `root`/devices/system/…, which is returned: what stands for /sys."""
        for name, text in self._files():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return root

    def _files(self) -> Iterable[tuple[str, object]]:
        system, everything = "devices/system/cpu", self.online | self.offline
        yield f"{system}/kernel_max", 8191
        yield f"{system}/online", listed(self.online)
        for name in ("possible", "present"):
            yield f"{system}/{name}", listed(everything)
        if self.offline:
            yield f"{system}/offline", listed(self.offline)
        for cpu in self.offline:  # has a folder, and nothing that describes it
            yield f"{system}/cpu{cpu}/online", 0
        for core in self.cores:
            for cpu in {*core.cpus} & self.online:
                for name, text in self._of_cpu(core, cpu):
                    yield f"{system}/cpu{cpu}/{name}", text
        yield from self._nodes()
        for kind, cpus in self.kinds.items():
            yield f"devices/{kind}/cpus", cpus
        if self.quota:
            yield "fs/cgroup/cpu.max", self.quota

    def _of_cpu(self, core: Core, cpu: int) -> Iterable[tuple[str, object]]:
        siblings, package = self._sharing(core, "id", "cluster", "socket"), self._sharing(core, "socket")
        yield "topology/physical_package_id", core.socket
        yield "topology/core_id", core.id
        sets = {"core_cpus": siblings, "thread_siblings": siblings}
        sets |= {"package_cpus": package, "core_siblings": package}
        if core.cluster is not None:
            yield "topology/cluster_id", core.cluster
            sets["cluster_cpus"] = self._sharing(core, "cluster", "socket")
        for name, cpus in sets.items():
            yield f"topology/{name}", mask(cpus)
            yield f"topology/{name}_list", listed(cpus)
        if self.l2_kib:
            l2 = siblings if core.l2 is None else self._sharing(core, "l2")
            caches = [
                (1, "Data", 32, siblings),
                (1, "Instruction", 32, siblings),
                (2, "Unified", self.l2_kib, l2),
            ]
            if core.l3 is not None:
                caches.append((3, "Unified", self.l3_kib, self._sharing(core, "l3")))
            for i, (level, kind, size, sharing) in enumerate(caches):
                yield f"cache/index{i}/level", level
                yield f"cache/index{i}/type", kind
                yield f"cache/index{i}/size", f"{size}K"
                yield f"cache/index{i}/shared_cpu_map", mask(sharing)
                yield f"cache/index{i}/shared_cpu_list", listed(sharing)
        if core.khz:
            yield "cpufreq/cpuinfo_max_freq", core.khz
        if core.capacity:
            yield "cpu_capacity", core.capacity

    def _sharing(self, core: Core, *names: str) -> frozenset[int]:
        """Return the CPUs of all cores that have these in common with one."""
        same = (c for c in self.cores if all(getattr(c, name) == getattr(core, name) for name in names))
        return frozenset(cpu for c in same for cpu in c.cpus) & self.online

    def _nodes(self) -> Iterable[tuple[str, object]]:
        with_cpus = {core.region for core in self.cores} - {None}
        regions = sorted({*with_cpus, *self.regions})
        if not regions:
            return
        system = "devices/system/node"
        yield f"{system}/online", listed(regions)
        yield f"{system}/possible", listed(regions)
        yield f"{system}/has_cpu", listed(with_cpus)
        for i, region in enumerate(regions):
            cpus = {cpu for core in self.cores if core.region == region for cpu in core.cpus}
            yield f"{system}/node{region}/cpumap", mask(cpus & self.online)
            yield f"{system}/node{region}/cpulist", listed(cpus & self.online)
            yield f"{system}/node{region}/distance", " ".join(map(str, self.distances[i]))
            yield f"{system}/node{region}/meminfo", f"Node {region} MemTotal:  {self.memory * MIB} kB"


def listed(cpus: Iterable[int]) -> str:
    """{0, 1, 2, 7} → "0-2,7", as the kernel lists CPUs."""
    runs = groupby(enumerate(sorted(cpus)), lambda pair: pair[1] - pair[0])
    ends = ([cpu for _, cpu in run] for _, run in runs)
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in ends)


def mask(cpus: Iterable[int]) -> str:
    """{0, 1, 33} → "00000002,00000003", as the kernel writes sets of CPUs."""
    number, words = sum(1 << cpu for cpu in cpus), []
    while number or not words:
        words.insert(0, f"{number & 0xFFFFFFFF:08x}")
        number >>= 32
    return ",".join(words)


def _grouped(regions: int, of_socket: int, near: int, far: int) -> list[list[int]]:
    """Distances of regions of which some make a socket."""
    return [
        [10 if i == j else near if i // of_socket == j // of_socket else far for j in range(regions)]
        for i in range(regions)
    ]


ARCHER2 = Tree(  # 2 × EPYC 7742, NPS4
    [Core((i, i + 128), i // 64, i // 16, i // 4, i % 64, khz=2250000) for i in range(128)],
    Seen(cpus=256, cores=128, sockets=2, regions=8, l3=32),
    l2_kib=512,
    l3_kib=16 * MIB,
    memory=32000,
    distances=_grouped(8, 4, 12, 32),
)
SAPPHIRE_RAPIDS = Tree(  # 2 × Xeon Platinum 8480+, SNC4: a third-level cache spans four regions
    [Core((i, i + 112), i // 56, i // 14, i // 56, i % 56, khz=3800000) for i in range(112)],
    Seen(cpus=224, cores=112, sockets=2, regions=8, l3=2),
    l2_kib=2 * MIB,
    l3_kib=105 * MIB,
    memory=64000,
    distances=_grouped(8, 4, 12, 21),
)
GENOA = Tree(  # 2 × EPYC 9654, NPS1
    [Core((i, i + 192), i // 96, i // 96, i // 8, i % 96, khz=3700000) for i in range(192)],
    Seen(cpus=384, cores=192, sockets=2, regions=2, l3=24),
    l2_kib=MIB,
    l3_kib=32 * MIB,
    memory=386000,
    distances=_grouped(2, 1, 0, 32),
)
GRACE = Tree(  # GH200: node 1 is the GPU's memory, nodes 2 to 8 are for its instances and empty
    [Core((i,), id=i, khz=3438000, capacity=1024) for i in range(72)],
    Seen(cpus=72, cores=72, sockets=1, regions=1, l3=1),
    l2_kib=MIB,
    l3_kib=114 * MIB,
    memory=480000,
    distances=[[10 if i == j else 80 if not i * j else 255 for j in range(9)] for i in range(9)],
    regions=range(1, 9),
)
_IDS = [8 * (i // 6) + i % 6 for i in range(24)]  # of Xeons: 0-5, 8-13, …, the same on both sockets
CASCADE_LAKE = Tree(  # 2 × Xeon Gold 6248R in a Dell, whose firmware numbers CPUs by turns
    [Core((i, i + 48), i % 2, i % 2, i % 2, _IDS[i // 2], khz=4000000) for i in range(48)],
    Seen(cpus=96, cores=48, sockets=2, regions=2, l3=2),
    l2_kib=MIB,
    l3_kib=36608,
    memory=192000,
    distances=_grouped(2, 1, 0, 21),
)
ALDER_LAKE = (
    Tree(  # i7-12700H: 6 cores with two CPUs, two of them favoured, and 8 slow ones, which share L2 by fours
        [
            *(Core((2 * i, 2 * i + 1), id=4 * i, khz=4700000 if i in (2, 3) else 4600000) for i in range(6)),
            *(Core((12 + i,), id=24 + i, l2=i // 4, khz=3500000) for i in range(8)),
        ],
        Seen(cpus=20, cores=14, sockets=1, regions=1, l3=1),
        l2_kib=1280,
        l3_kib=24 * MIB,
        memory=31700,
        distances=[[10]],
        kinds={"cpu_core": "0-11", "cpu_atom": "12-19"},
    )
)
VIRTUAL = Tree(  # 2 CPUs, each in a socket of its own as QEMU makes them, of a kernel without NUMA
    [Core((i,), socket=i, region=None, l3=i) for i in range(2)],
    Seen(cpus=2, cores=2, sockets=2, regions=0, l3=2),
    l2_kib=512,
    l3_kib=16 * MIB,
)
_RYZEN = Tree(  # Ryzen 7 5800X
    [Core((i, i + 8), id=i, khz=4850195) for i in range(8)],
    Seen(cpus=16, cores=8, sockets=1, regions=1, l3=1),
    l2_kib=512,
    l3_kib=32 * MIB,
    memory=64000,
    distances=[[10]],
)
CONTAINER = replace(_RYZEN, quota="50000 100000")  # half a core, and the host's files
HOLES = replace(_RYZEN, allowed=frozenset({0, 1, 2, 3, 7, 9, 10, 11}))  # 9 to 11 are siblings of 1 to 3
OFFLINE = Tree(  # 2 × E5-2630 v3: SMT is switched off, and so is core 5, which is broken
    [Core((i, i + 16), i // 8, i // 8, i // 8, i % 8, khz=3200000) for i in range(16)],
    Seen(cpus=15, cores=15, sockets=2, regions=2, l3=2),
    l2_kib=256,
    l3_kib=20 * MIB,
    memory=64000,
    distances=_grouped(2, 1, 0, 21),
    offline=frozenset({5, *range(16, 32)}),
)
_SLOW = {"khz": 1800000, "capacity": 397}  # 530 / 1024 for a Hz, at 1.8 of 2.4 GHz
BIG_LITTLE = Tree(  # RK3588: core_id begins anew in each cluster
    [
        *(Core((i,), id=i, cluster=0, **_SLOW) for i in range(4)),
        *(Core((4 + i,), id=i % 2, cluster=1 + i // 2, khz=2400000, capacity=1024) for i in range(4)),
    ],
    Seen(cpus=8, cores=8, sockets=1, regions=1, l3=1),
    l2_kib=512,
    l3_kib=3 * MIB,
    memory=16000,
    distances=[[10]],
)
_OF_CMGS = ((10, 20, 30, 30), (20, 10, 30, 30), (30, 30, 10, 20), (30, 30, 20, 10))
_TO_ASSISTANTS = ((40, 50, 60, 60), (50, 40, 60, 60), (60, 60, 40, 50), (60, 60, 50, 40))
A64FX = Tree(  # Fugaku: CPUs 0 and 1 are the system's; no caches are shown; each group of 12 is a socket
    [
        *(Core((i,), i, i, None) for i in range(2)),
        *(Core((i,), 3 + i // 12, 3 + i // 12, None, i % 12) for i in range(12, 60)),
    ],
    Seen(cpus=50, cores=50, sockets=6, regions=6, l3=0),
    memory=7400,
    distances=[
        *(a + b for a, b in zip(_OF_CMGS, _TO_ASSISTANTS, strict=True)),
        *(b + a for a, b in zip(_OF_CMGS, _TO_ASSISTANTS, strict=True)),
    ],
    regions=(2, 3),
    allowed=frozenset(range(12, 60)),
)
POWER9 = Tree(  # AC922, 2 × 16 cores of four CPUs: NUMA nodes 0 and 8, those of GPUs are 252 to 255
    [
        Core(
            tuple(range(4 * i, 4 * i + 4)),
            8 * (i // 16),
            8 * (i // 16),
            i // 2,
            8 * i,
            l2=i // 2,
            khz=3800000,
        )
        for i in range(32)
    ],
    Seen(cpus=128, cores=32, sockets=2, regions=2, l3=16),
    l2_kib=512,
    l3_kib=10 * MIB,
    memory=126000,
    distances=[[10 if i == j else 40 if i < 2 and j < 2 else 80 for j in range(6)] for i in range(6)],
    regions=(252, 253, 254, 255),
)

TREES = {
    "archer2": ARCHER2,
    "sapphire rapids": SAPPHIRE_RAPIDS,
    "genoa": GENOA,
    "grace": GRACE,
    "cascade lake": CASCADE_LAKE,
    "alder lake": ALDER_LAKE,
    "virtual": VIRTUAL,
    "container": CONTAINER,
    "holes": HOLES,
    "offline": OFFLINE,
    "big.LITTLE": BIG_LITTLE,
    "a64fx": A64FX,
    "power9": POWER9,
}


@cache
def sys_of(name: str) -> Path:
    """Write a tree once for all tests of a process, which only read it: what stands for /sys there."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return TREES[name].write(Path(folder) / "sys")
