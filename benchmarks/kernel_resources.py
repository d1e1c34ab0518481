"""Compile the CUDA kernels without a GPU: print what each takes, or fill the cache for a session on one.

    python benchmarks/kernel_resources.py [--arch sm_90] [--type bfloat16] [source …]
    XDG_CACHE_HOME=FOLDER python benchmarks/kernel_resources.py --fill-cache [--arch sm_90]

Needs NVRTC. The cache holds for the same version of NVRTC only; `benchmarks/gpu_session.sh` uses it as CACHE.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

from distgpt.config.presets import preset
from distgpt.errors import DistgptError
from distgpt.gpu import compiling
from distgpt.gpu.api import STORAGE, WIDE
from distgpt.gpu.attention import attention_shape, delta_defines, mma_defines
from distgpt.gpu.kernels import norm_shape

# Sizes to print: GPT-2's first, and larger ones.
CHANNELS = (768, 1600, 5120)
HEADS = (64, 128)
FOR_BFLOAT16 = ("attention_mma", "float8")  # sources for this type alone
BENCHMARKED = ("gpt2", "gpt-mini", "S", "M", "L", "VL", "XL")
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")


class Resources(NamedTuple):
    """What a kernel takes: registers per thread, the rest in bytes. `stack` and spills are slow memory."""

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared: int  # without dynamic shared memory


_WORDS = ("registers", "bytes stack frame", "bytes spill stores", "bytes spill loads", "bytes smem")


def resources(report: str) -> dict[str, Resources]:
    """By kernel, from a report of ptxas, which lists the functions that a kernel calls with it."""
    _, *parts = _ENTRY.split(report)
    return {
        kernel: Resources(*(max(map(int, re.findall(rf"(\d+) {each}", part)), default=0) for each in _WORDS))
        for kernel, part in zip(parts[::2], parts[1::2], strict=True)
    }


def variants(
    source: str, type: str, channels: tuple[int, ...] = CHANNELS, heads: tuple[int, ...] = HEADS
) -> Iterator[tuple[str, ...]]:
    """The macros of each way to compile a source for a storage type."""
    storage = compiling.storage_define(type)
    if source == "attention":
        yield from ((storage, *attention_shape(head, WIDE[type].itemsize, 1).defines) for head in heads)
    elif source == "attention_delta":
        yield from ((storage, *delta_defines(head)) for head in heads)
    elif source in FOR_BFLOAT16 and type != "bfloat16":
        return
    elif source == "attention_mma":
        yield from ((storage, *mma_defines(head, 1)) for head in heads)
    elif source == "attention_cached":
        yield from ((storage, f"HEAD={head}", "GROUP=1") for head in heads)
    elif source == "norm":
        yield from ((storage, *norm_shape(width, WIDE[type].itemsize)[2]) for width in channels)
    else:
        yield (storage,)


def fill_cache(arch: str) -> int:
    """Compile what training, decoding and evaluating the benchmarked presets uses; return how many cubins."""
    shapes = [preset(name).model for name in BENCHMARKED]
    sizes = [tuple({getattr(shape, key) for shape in shapes}) for key in ("n_embd", "head_size")]
    every = ((source, type) for source in compiling.source_names() for type in STORAGE)
    wanted = {(source, defines) for source, type in every for defines in variants(source, type, *sizes)}
    for source, defines in sorted(wanted):
        compiling.cubin(source, defines, arch)
    return len(wanted)


def main() -> int:
    parser = argparse.ArgumentParser(description="Compile the CUDA kernels without a GPU.")
    parser.add_argument("source", nargs="*", help="all, if none is named")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--type", choices=STORAGE, action="append", help="all, if none is named")
    parser.add_argument("--fill-cache", action="store_true", help="compile for the benchmark; print no table")
    args = parser.parse_args()
    names = compiling.source_names()
    if unknown := sorted(set(args.source) - set(names)):
        parser.error(f"there is no {unknown[0]}.cu; there are {', '.join(names)}")
    try:
        if args.fill_cache:
            print(f"{fill_cache(args.arch)} kernels for {args.arch} are in the cache")
            return 0
        line = "{:<34} {:<9} {:<13} {:>9} {:>6} {:>7} {:>7}"
        print(f"cu/*.cu for {args.arch}; bytes of stack, spills, fixed shared memory\n")
        print(line.format("kernel", "type", "for", "registers", "stack", "spills", "shared"))
        for source, type in product(args.source or names, args.type or STORAGE):
            for defines in variants(source, type):
                report = compiling.compile_source(source, defines, args.arch).report
                for kernel, used in sorted(resources(report).items()):
                    spills = used.spill_stores + used.spill_loads
                    size = "".join(defines[1:2])
                    print(line.format(kernel, type, size, used.registers, used.stack, spills, used.shared))
    except DistgptError as error:
        print(f"kernel_resources: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
