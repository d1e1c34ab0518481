"""Compile the CUDA kernels without a GPU and print their resources, or fill the cache for a GPU machine.

    python benchmarks/kernel_resources.py [--arch sm_90] [--type bfloat16] [--presets] [source …]
    XDG_CACHE_HOME=DIR python benchmarks/kernel_resources.py --fill-cache [--arch sm_90]

`--presets` prints every variant that a preset or a depth uses. Requires NVRTC. The cache is valid for one
version of NVRTC; `benchmarks/gpu_carry.py` uses the GPU machine's version.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import product
from typing import NamedTuple

from distgpt.core.base.errors import DistgptError
from distgpt.core.config.presets import PRESETS, preset
from distgpt.gpu import compiling
from distgpt.gpu.attention import LARGEST_HEAD, SIDE, attention_shape, delta_defines, mma_defines
from distgpt.gpu.device import STORAGE, WIDE
from distgpt.gpu.kernels import norm_shape
from distgpt.recipes.scaling import HEAD, width


class Attended(NamedTuple):
    """Constants for which attention is compiled: head size, query heads per key head, and visible keys."""

    head: int
    group: int = 1
    window: int = 0
    packed: bool = False

    @property
    def seen(self) -> tuple[str, ...]:
        return ("PACKED=1",) * self.packed + (f"WINDOW={self.window}",) * bool(self.window)


# GPT-2's sizes, and larger ones
CHANNELS = (768, 1600, 5120)
ATTENDED = (Attended(64), Attended(128))
FOR_BFLOAT16 = ("attention_mma",)  # only for bfloat16
USERS_TYPES = ("bfloat16", "float32")  # types used by runs on GPUs
DEPTHS = (2, 3, 4, 5, 6, 8, 12)  # all depths that --within chooses
WINDOWS = (64, 128, 256)  # windows of these depths: a quarter of the context
NAMED = ("HEAD", "GROUP", "WINDOW", "PACKED", "CHANNELS")  # macros in the table
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")


class Resources(NamedTuple):
    """Registers per thread of a kernel, and bytes of memory. `stack` and spills are slow memory."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int  # without dynamic shared memory


_WORDS = ("registers", "bytes stack frame", "bytes spill stores", "bytes spill loads", "bytes smem")


def resources(report: str) -> dict[str, Resources]:
    """Return the resources by kernel from a report of ptxas, which includes called functions."""
    _, *parts = _ENTRY.split(report)
    return {
        kernel: Resources(*(max(map(int, re.findall(rf"(\d+) {each}", part)), default=0) for each in _WORDS))
        for kernel, part in zip(parts[::2], parts[1::2], strict=True)
    }


def variants(
    source: str, type: str, channels: Iterable[int] = CHANNELS, attended: Iterable[Attended] = ATTENDED
) -> Iterator[tuple[str, ...]]:
    storage = compiling.storage_define(type)
    on_tensor_cores = [each for each in attended if each.head % SIDE == 0 and each.head <= LARGEST_HEAD]
    if source in FOR_BFLOAT16 and type != "bfloat16":
        return
    if source == "attention":
        for each in attended:
            shape = attention_shape(each.head, WIDE[type].itemsize, each.group)
            yield (storage, *shape.defines, *each.seen)
    elif source == "attention_delta":
        yield from dict.fromkeys((storage, *delta_defines(each.head)) for each in attended)
    elif source == "attention_mma":
        yield from ((storage, *mma_defines(each.head, each.group), *each.seen) for each in on_tensor_cores)
    elif source == "attention_cached":  # a cache holds one sequence
        for each in attended:
            if not each.packed:
                yield (storage, f"HEAD={each.head}", f"GROUP={each.group}", *each.seen)
    elif source == "norm":
        yield from ((storage, *norm_shape(width, WIDE[type].itemsize)[2]) for width in channels)
    else:
        yield (storage,)


def of_presets() -> tuple[list[int], list[Attended]]:
    shapes = [preset(name).model for name in PRESETS]
    channels = {shape.n_embd for shape in shapes} | {width(depth) for depth in DEPTHS}
    whole = {Attended(shape.head_size, shape.n_head // shape.kv_heads, shape.window) for shape in shapes}
    whole |= {Attended(HEAD, window=window) for window in WINDOWS}
    return sorted(channels), sorted(whole | {each._replace(packed=True) for each in whole})


def of_users() -> set[tuple[str, tuple[str, ...]]]:
    """Return the sources and macros that training, tuning, decoding and evaluating all presets use."""
    sizes = of_presets()
    every = ((source, type) for source in compiling.source_names() for type in USERS_TYPES)
    return {(source, defines) for source, type in every for defines in variants(source, type, *sizes)}


def fill_cache(arch: str) -> int:
    wanted = sorted(of_users())
    for source, defines in wanted:
        compiling.cubin(source, defines, arch)
    return len(wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the CUDA kernels without a GPU.")
    parser.add_argument("source", nargs="*", help="all, if none is named")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--type", choices=STORAGE, action="append", help="all, if none is named")
    parser.add_argument("--presets", action="store_true", help="every variant that a preset or a depth uses")
    parser.add_argument("--fill-cache", action="store_true", help="compile all; print no table")
    args = parser.parse_args()
    names = compiling.source_names()
    if unknown := sorted(set(args.source) - set(names)):
        parser.error(f"there is no {unknown[0]}.cu; there are {', '.join(names)}")
    try:
        if args.fill_cache:
            print(f"{fill_cache(args.arch)} kernels for {args.arch} are in the cache")
            return 0
        sizes = of_presets() if args.presets else (CHANNELS, ATTENDED)
        line = "{:<34} {:<9} {:<35} {:>9} {:>6} {:>7} {:>7}"
        print(f"cu/*.cu for {args.arch}; bytes of stack, spills, fixed shared memory\n")
        print(line.format("kernel", "type", "for", "registers", "stack", "spills", "shared"))
        for source, type in product(args.source or names, args.type or STORAGE):
            for defines in variants(source, type, *sizes):
                report = compiling.compile_source(source, defines, args.arch).report
                for kernel, used in sorted(resources(report).items()):
                    spills = used.spill_stores + used.spill_loads
                    size = " ".join(each for each in defines[1:] if each.startswith(NAMED))
                    print(line.format(kernel, type, size, used.registers, used.stack, spills, used.shared))
    except DistgptError as error:
        print(f"kernel_resources: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
