"""Thirteen kinds of nodes, written as Linux's files below /sys that distgpt reads.

Numbering and caches follow published output of numactl -H, lscpu and lstopo.
"""

import atexit
import shutil
import tempfile
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import NamedTuple


@dataclass(frozen=True)
class Core:
    """A core: its CPUs (hardware threads) and place. None: unknown to the kernel."""

    cpus: tuple[int, ...]
    socket: int = 0
    region: int | None = 0
    l3: int | None = 0  # cores with the same number share a third-level cache
    khz: int = 0
    capacity: int = 0


class Seen(NamedTuple):
    cpus: int
    cores: int
    sockets: int
    regions: int
    l3: int


@dataclass(frozen=True)
class Tree:
    cores: list
    seen: Seen
    regions: tuple = ()
    kinds: dict = field(default_factory=dict)  # "cpu_core" → its CPUs
    offline: frozenset = frozenset()
    allowed: frozenset | None = None  # CPUs of a process; None: all online CPUs

    @property
    def online(self):
        return frozenset(cpu for core in self.cores for cpu in core.cpus) - self.offline

    @property
    def affinity(self):
        return self.online if self.allowed is None else self.allowed

    def write(self, root):
        for name, text in self._files():
            path = root / "devices" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{text}\n")
        return root

    def _files(self):
        yield "system/cpu/online", listed(self.online)
        for cpu in self.offline:  # offline CPUs have no topology
            yield f"system/cpu/cpu{cpu}/online", 0
        for core in self.cores:
            own = listed({*core.cpus} & self.online)
            files = {"topology/physical_package_id": core.socket}
            files |= {"topology/core_cpus_list": own, "topology/thread_siblings_list": own}
            if core.l3 is not None:
                files |= {"cache/index3/level": 3, "cache/index3/shared_cpu_list": self._shared_by("l3", core.l3)}
            speeds = {"cpufreq/cpuinfo_max_freq": core.khz, "cpu_capacity": core.capacity}
            files |= {name: value for name, value in speeds.items() if value}
            for cpu in {*core.cpus} & self.online:
                yield from ((f"system/cpu/cpu{cpu}/{name}", text) for name, text in files.items())
        for region in {core.region for core in self.cores} - {None} | {*self.regions}:
            yield f"system/node/node{region}/cpulist", self._shared_by("region", region)
        yield from ((f"{kind}/cpus", cpus) for kind, cpus in self.kinds.items())

    def _shared_by(self, name, value):
        same = (core for core in self.cores if getattr(core, name) == value)
        return listed({cpu for core in same for cpu in core.cpus} & self.online)


def listed(cpus):
    """{0, 1, 2, 7} → "0-2,7", as the kernel lists CPUs."""
    runs = groupby(enumerate(sorted(cpus)), lambda pair: pair[1] - pair[0])
    ends = ([cpu for _, cpu in run] for _, run in runs)
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in ends)


_RYZEN = Tree(  # Ryzen 7 5800X
    [Core((i, i + 8), khz=4850195) for i in range(8)], Seen(cpus=16, cores=8, sockets=1, regions=1, l3=1)
)
_SLOW = {"khz": 1800000, "capacity": 397}  # 530 / 1024 for a Hz, at 1.8 of 2.4 GHz

TREES = {
    "archer2": Tree(  # 2 × EPYC 7742, NPS4
        [Core((i, i + 128), i // 64, i // 16, i // 4, khz=2250000) for i in range(128)],
        Seen(cpus=256, cores=128, sockets=2, regions=8, l3=32),
    ),
    "sapphire rapids": Tree(  # 2 × Xeon Platinum 8480+, SNC4: a third-level cache spans four regions
        [Core((i, i + 112), i // 56, i // 14, i // 56, khz=3800000) for i in range(112)],
        Seen(cpus=224, cores=112, sockets=2, regions=8, l3=2),
    ),
    "genoa": Tree(  # 2 × EPYC 9654, NPS1
        [Core((i, i + 192), i // 96, i // 96, i // 8, khz=3700000) for i in range(192)],
        Seen(cpus=384, cores=192, sockets=2, regions=2, l3=24),
    ),
    "grace": Tree(  # GH200: node 1 is the GPU's memory, nodes 2 to 8 are for its instances and empty
        [Core((i,), khz=3438000, capacity=1024) for i in range(72)],
        Seen(cpus=72, cores=72, sockets=1, regions=1, l3=1),
        regions=range(1, 9),
    ),
    "cascade lake": Tree(  # 2 × Xeon Gold 6248R in a Dell, whose firmware numbers CPUs by turns
        [Core((i, i + 48), i % 2, i % 2, i % 2, khz=4000000) for i in range(48)],
        Seen(cpus=96, cores=48, sockets=2, regions=2, l3=2),
    ),
    "alder lake": Tree(  # i7-12700H: 6 cores with two CPUs, two of them favoured, and 8 slow ones
        [
            *(Core((2 * i, 2 * i + 1), khz=4700000 if i in (2, 3) else 4600000) for i in range(6)),
            *(Core((12 + i,), khz=3500000) for i in range(8)),
        ],
        Seen(cpus=20, cores=14, sockets=1, regions=1, l3=1),
        kinds={"cpu_core": "0-11", "cpu_atom": "12-19"},
    ),
    "virtual": Tree(  # QEMU: 2 CPUs in separate sockets, without NUMA
        [Core((i,), socket=i, region=None, l3=i) for i in range(2)], Seen(cpus=2, cores=2, sockets=2, regions=0, l3=2)
    ),
    "container": _RYZEN,  # half a core, and the host's files
    "holes": replace(_RYZEN, allowed=frozenset({0, 1, 2, 3, 7, 9, 10, 11})),  # 9 to 11 are siblings of 1 to 3
    "offline": Tree(  # 2 × E5-2630 v3: SMT is switched off, and so is core 5, which is broken
        [Core((i, i + 16), i // 8, i // 8, i // 8, khz=3200000) for i in range(16)],
        Seen(cpus=15, cores=15, sockets=2, regions=2, l3=2),
        offline=frozenset({5, *range(16, 32)}),
    ),
    "big.LITTLE": Tree(  # RK3588
        [*(Core((i,), **_SLOW) for i in range(4)), *(Core((4 + i,), khz=2400000, capacity=1024) for i in range(4))],
        Seen(cpus=8, cores=8, sockets=1, regions=1, l3=1),
    ),
    "a64fx": Tree(  # Fugaku: CPUs 0 and 1 are the system's; no caches are shown; each group of 12 is a socket
        [
            *(Core((i,), i, i, None) for i in range(2)),
            *(Core((i,), 3 + i // 12, 3 + i // 12, None) for i in range(12, 60)),
        ],
        Seen(cpus=50, cores=50, sockets=6, regions=6, l3=0),
        regions=(2, 3),
        allowed=frozenset(range(12, 60)),
    ),
    "power9": Tree(  # AC922, 2 × 16 cores of four CPUs; NUMA nodes 0, 8 and 252 to 255 (GPUs)
        [Core(tuple(range(4 * i, 4 * i + 4)), 8 * (i // 16), 8 * (i // 16), i // 2, khz=3800000) for i in range(32)],
        Seen(cpus=128, cores=32, sockets=2, regions=2, l3=16),
        regions=(252, 253, 254, 255),
    ),
}


@cache
def sys_of(name):
    """Write a tree once per process; return the directory that replaces /sys."""
    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return TREES[name].write(Path(folder) / "sys")
