"""A node as Linux describes it in /sys: its CPUs, and their cores, third-level caches, NUMA regions, sockets.

A CPU is what Linux numbers and schedules on: a hardware thread of a core, of which SMT gives a core several.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TypeAlias

SYS = Path("/sys")
MOST_CPUS = 1 << 14  # more than Linux can be built for: a file that lists more is damaged
SLOW = 0.7  # of the fastest cores' capacity; preferred cores of one kind differ by less


@dataclass(frozen=True, slots=True)
class Cpu:
    """A CPU, and what it shares with which others. `core` and `cache` are the lowest CPU among them."""

    number: int
    core: int
    cache: int  # of the third level, within a NUMA region
    region: int  # the number of the NUMA region
    socket: int
    fast: bool = True  # not one of the efficient cores beside faster ones


Core: TypeAlias = tuple[Cpu, ...]  # those of its CPUs that may be used


@dataclass(frozen=True)
class Machine:
    """The CPUs that are online, by number, and those that this process may run on.

    `doubts` says in a sentence each what cannot be true. Then `cpus` are the allowed ones alone, each a core
    of its own in one cache, region and socket.
    """

    cpus: tuple[Cpu, ...]
    allowed: frozenset[int]
    doubts: tuple[str, ...] = ()

    @cached_property
    def usable(self) -> tuple[Cpu, ...]:
        """The CPUs that this process may run on."""
        return tuple(cpu for cpu in self.cpus if cpu.number in self.allowed)

    @cached_property
    def cores(self) -> list[Core]:
        """Each core as its usable CPUs, neighbours side by side; no slow cores beside fast ones."""
        found: dict[int, list[Cpu]] = {}
        for cpu in self.usable:
            found.setdefault(cpu.core, []).append(cpu)
        fast = [tuple(core) for core in found.values() if core[0].fast]
        each = fast or [tuple(core) for core in found.values()]
        return sorted(each, key=lambda core: (core[0].socket, core[0].region, core[0].cache, core[0].number))


def is_flat(cpus: Sequence[Cpu]) -> bool:
    """Return whether all cores are as near to one another and to memory."""
    caches = {cpu.core: cpu.cache for cpu in cpus}
    shared = [cache for cache, users in Counter(caches.values()).items() if users > 1]
    return len({cpu.region for cpu in cpus}) < 2 and len(shared) < 2  # virtual machines show one a core


class _Lie(Exception):
    """Says what in /sys is missing, or contradicts the rest."""


def read_machine(root: Path = SYS, allowed: Iterable[int] = ()) -> Machine:
    """Read a node below `root`, whatever lies there. `allowed`: the affinity of this process; empty: all."""
    mask = frozenset(allowed)
    try:
        cpus = tuple(_cpus(root / "devices", mask))
        return Machine(cpus, mask or frozenset(cpu.number for cpu in cpus))
    except _Lie as lie:
        flat = min(mask, default=0)
        alone = tuple(Cpu(number, number, flat, 0, 0) for number in sorted(mask))
        return Machine(alone, mask, (str(lie),))


def cpu_list(text: str) -> frozenset[int]:
    """Read a list as /sys writes it: "0-3,7" → {0, 1, 2, 3, 7}. Raises ValueError."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        if not 0 <= int(first) <= int(last or first) < MOST_CPUS:
            raise ValueError(part)
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def listed(cpus: Iterable[int]) -> str:
    """Write a list as /sys does: {0, 1, 2, 3, 7} → "0-3,7"."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1][1:] = [cpu]
        else:
            parts.append([cpu])
    return ",".join("-".join(map(str, part)) for part in parts)


def _cpus(devices: Path, allowed: frozenset[int]) -> Iterator[Cpu]:
    online = _list(devices / "system/cpu/online")
    if not online:
        raise _Lie(f"{devices}/system/cpu does not say which CPUs are online")
    if hidden := allowed - online:
        raise _Lie(f"this process may run on CPU {listed(hidden)}, which {devices} does not list as online")
    region_of = _regions(devices, online)
    core_of = _groups(online, lambda cpu: _core(devices, cpu), f"cores of {devices}/system/cpu")
    cache_of = _groups(
        online, lambda cpu: _cache(devices, cpu), f"third-level caches of {devices}/system/cpu"
    )
    first = {cpu: min(core) for cpu, core in core_of.items()}
    heads = frozenset(first.values())  # a CPU of each core, which stands for all
    socket_of = {cpu: _number(_folder(devices, cpu) / "topology/physical_package_id") for cpu in heads}
    slow = _slow(devices, heads)
    for cpu in sorted(online):
        head, region = first[cpu], region_of[cpu]
        if region != region_of[head]:
            raise _Lie(f"the core of CPU {cpu} lies in several NUMA regions of {devices}/system/node")
        # Intel's sub-NUMA clusters cut a region out of a cache: ranks of different regions do not share it.
        near = [other for other in cache_of[cpu] or online if region_of[other] == region]
        yield Cpu(cpu, head, min(near), region, max(0, socket_of[head]), head not in slow)


def _groups(
    cpus: frozenset[int], group_of: Callable[[int], frozenset[int]], what: str
) -> dict[int, frozenset[int]]:
    """Return each CPU's group, which is read once for all of it."""
    found: dict[int, frozenset[int]] = {}
    for cpu in sorted(cpus):
        if cpu not in found:
            group = group_of(cpu) & cpus
            if group & found.keys() or (group and cpu not in group):
                raise _Lie(f"CPU {cpu} contradicts others about the {what}")
            found |= dict.fromkeys(group or {cpu}, group)
    return found


def _folder(devices: Path, cpu: int) -> Path:
    return devices / f"system/cpu/cpu{cpu}"


def _regions(devices: Path, online: frozenset[int]) -> dict[int, int]:
    """Return the NUMA region of each CPU. A kernel without NUMA tells of none: all are in one."""
    regions: dict[int, frozenset[int]] = {}
    with suppress(OSError):
        for folder in (devices / "system/node").iterdir():
            if found := re.fullmatch(r"node(\d+)", folder.name):
                regions[int(found[1])] = _list(folder / "cpulist") & online
    if not any(regions.values()):
        return dict.fromkeys(online, 0)
    region_of = {cpu: region for region, cpus in regions.items() for cpu in cpus}
    if len(region_of) < len(online) or sum(map(len, regions.values())) > len(online):
        raise _Lie(f"the NUMA regions of {devices}/system/node do not hold each CPU once")
    return region_of


def _core(devices: Path, cpu: int) -> frozenset[int]:
    """Return the CPUs of a CPU's core."""
    topology = _folder(devices, cpu) / "topology"
    if core := _list(topology / "core_cpus_list") or _list(topology / "thread_siblings_list"):  # before 5.3
        return core
    raise _Lie(f"{topology} does not say which CPUs are one core")


def _cache(devices: Path, cpu: int) -> frozenset[int]:
    """Return the CPUs with which one shares a third-level cache; none if it has none, or does not say."""
    for index in range(8):
        cache = _folder(devices, cpu) / f"cache/index{index}"
        level = _text(cache / "level")
        if level == "3":
            return _list(cache / "shared_cpu_list")
        if not level:
            break
    return frozenset()


def _slow(devices: Path, heads: frozenset[int]) -> frozenset[int]:
    """Return those first CPUs of cores that are efficient ones, where the machine has faster ones."""
    if atoms := _list(devices / "cpu_atom/cpus") & heads:  # Intel's hybrid processors
        return atoms if _list(devices / "cpu_core/cpus") & heads else frozenset()
    for file in ("cpu_capacity", "cpufreq/cpuinfo_max_freq"):  # ARM's; AMD's cores of two sizes
        speeds = {cpu: _number(_folder(devices, cpu) / file) for cpu in heads}
        if all(speed > 0 for speed in speeds.values()):
            return frozenset(cpu for cpu, speed in speeds.items() if speed < SLOW * max(speeds.values()))
    return frozenset()


def _list(path: Path) -> frozenset[int]:
    """Read a list of CPUs; none where it is not there."""
    try:
        return cpu_list(_text(path))
    except ValueError:
        raise _Lie(f"{path} is no list of CPUs") from None


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdecimal() else -1


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, ValueError):  # also bytes that are no text
        return ""
