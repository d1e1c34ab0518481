"""The CPUs of a node according to /sys, with their cores, L3 caches, NUMA regions and sockets.

A CPU is a hardware thread, the unit that Linux numbers and schedules on. With SMT a core has multiple CPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

from distgpt.core.base.formatting import in_runs

SYS = Path("/sys")
MOST_CPUS = 1 << 14  # the maximum of Linux builds
SLOW = 0.7  # fraction of the fastest cores' capacity; preferred cores of the same kind differ by less


@dataclass(frozen=True, slots=True)
class Cpu:
    """A CPU and the resources it shares. `core` and `cache` are the lowest CPU number in their group."""

    number: int
    core: int
    cache: int  # L3, within a NUMA region
    region: int  # number of the NUMA region
    socket: int
    fast: bool = True  # not an efficiency core next to faster ones


Core: TypeAlias = tuple[Cpu, ...]  # its usable CPUs


@dataclass(frozen=True)
class Machine:
    """The online CPUs by number, and the numbers of the CPUs that this process may run on.

    If /sys cannot be read, `doubts` has the reason. `cpus` are then the allowed CPUs, each as a core, all in
    one cache, region and socket.
    """

    cpus: tuple[Cpu, ...]
    allowed: frozenset[int]
    doubts: tuple[str, ...] = ()

    @cached_property
    def usable(self) -> tuple[Cpu, ...]:
        """CPUs that this process may run on."""
        return tuple(cpu for cpu in self.cpus if cpu.number in self.allowed)

    @cached_property
    def cores(self) -> list[Core]:
        """Each core as its usable CPUs, in order of proximity. Slow cores next to fast ones are omitted."""
        result: dict[int, list[Cpu]] = {}
        for cpu in self.usable:
            result.setdefault(cpu.core, []).append(cpu)
        fast = [tuple(core) for core in result.values() if core[0].fast]
        each = fast or [tuple(core) for core in result.values()]
        return sorted(each, key=lambda core: (core[0].socket, core[0].region, core[0].cache, core[0].number))


def is_flat(cpus: Sequence[Cpu]) -> bool:
    """Return whether all cores are equally near to each other and to memory."""
    caches = {cpu.core: cpu.cache for cpu in cpus}
    shared = [cache for cache, users in Counter(caches.values()).items() if users > 1]
    return len({cpu.region for cpu in cpus}) < 2 and len(shared) < 2  # VMs show one cache per core


def read_machine(root: Path = SYS, allowed: Iterable[int] = ()) -> Machine:
    """Read a node below `root`. `allowed`: the affinity of this process; if empty, all CPUs."""
    mask = frozenset(allowed)
    try:
        cpus = tuple(_cpus(root / "devices/system", root / "devices"))
        online = frozenset(cpu.number for cpu in cpus)
        if hidden := mask - online:
            raise ValueError(f"CPU {in_runs(hidden)} is not listed as online")
        return Machine(cpus, mask or online)
    except (OSError, ValueError) as error:
        alone = tuple(Cpu(number, number, min(mask), 0, 0) for number in sorted(mask))
        return Machine(alone, mask, (f"{root} does not describe the CPUs ({error})",))


def cpu_list(text: str) -> frozenset[int]:
    """Parse a CPU list of /sys, such as "0-3,7" → {0, 1, 2, 3, 7}. Raise ValueError if it is invalid."""
    result: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        if not 0 <= int(first) <= int(last or first) < MOST_CPUS:
            raise ValueError(part)
        result.update(range(int(first), int(last or first) + 1))
    return frozenset(result)


def _cpus(system: Path, devices: Path) -> Iterator[Cpu]:
    if not (online := cpu_list((system / "cpu/online").read_text())):
        raise ValueError("no CPU is online")
    folders = {cpu: system / f"cpu/cpu{cpu}" for cpu in online}
    # Without NUMA support in the kernel there are no regions, so all CPUs are in one.
    region_of = dict.fromkeys(online, 0)
    for path in system.glob("node/node[0-9]*/cpulist"):
        region_of |= dict.fromkeys(cpu_list(path.read_text()) & online, int(path.parent.name[4:]))

    def core(cpu: int) -> frozenset[int]:
        topology = folders[cpu] / "topology"
        result = _list(topology / "core_cpus_list") or _list(topology / "thread_siblings_list")  # < 5.3
        if not result:
            raise ValueError(f"{topology} does not list the CPUs of a core")
        return result

    def cache(cpu: int) -> frozenset[int]:
        levels = (folders[cpu] / f"cache/index{index}" for index in range(8))
        third = next((each for each in levels if _text(each / "level") == "3"), None)
        users = third and _list(third / "shared_cpu_list")
        # Intel's sub-NUMA clustering divides a cache between regions, which then do not share it.
        return frozenset(each for each in users or online if region_of.get(each) == region_of[cpu])

    core_of, cache_of = _heads(online, core), _heads(online, cache)
    heads = frozenset(core_of.values())
    socket_of = {cpu: _number(folders[cpu] / "topology/physical_package_id") for cpu in heads}
    slow = _slow(devices, folders, heads)
    for cpu in sorted(online):
        head = core_of[cpu]
        yield Cpu(cpu, head, cache_of[cpu], region_of[cpu], max(0, socket_of[head]), head not in slow)


def _heads(cpus: frozenset[int], group_of: Callable[[int], frozenset[int]]) -> dict[int, int]:
    """Map each CPU to the lowest CPU of its group. Each group is read once."""
    result: dict[int, int] = {}
    for cpu in sorted(cpus):
        if cpu not in result:
            result = {**dict.fromkeys((group_of(cpu) & cpus) | {cpu}, cpu), **result}
    return result


def _slow(devices: Path, folders: dict[int, Path], heads: frozenset[int]) -> frozenset[int]:
    """Return the first CPUs of efficiency cores, if the machine also has faster ones."""
    if atoms := _list(devices / "cpu_atom/cpus") & heads:  # Intel's hybrid processors
        return atoms if _list(devices / "cpu_core/cpus") & heads else frozenset()
    for file in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):  # ARM; AMD with cores of two sizes
        speeds = {cpu: _number(folders[cpu] / file) for cpu in heads}
        if min(speeds.values(), default=0) > 0:
            return frozenset(cpu for cpu, speed in speeds.items() if speed < SLOW * max(speeds.values()))
    return frozenset()


def _list(path: Path) -> frozenset[int]:
    return cpu_list(_text(path))


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdecimal() else -1


def _text(path: Path) -> str:
    """Return the text of a file, "" if it cannot be read."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""
