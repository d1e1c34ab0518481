"""What each CUDA kernel takes of a GPU, by NVRTC's word: registers, slow local memory, shared memory.

    python benchmarks/kernel_resources.py [--arch sm_90] [--type bfloat16] [source …]

No GPU is needed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from distgpt.errors import DistgptError
from distgpt.gpu import nvrtc, sources
from distgpt.gpu.attention import mma_defines
from distgpt.gpu.attention_tiles import attention_shape
from distgpt.gpu.dtypes import STORAGE, WIDE
from distgpt.gpu.kernels import norm_shape

# Sizes to compile for: GPT-2's first, and larger ones.
CHANNELS = (768, 1600, 5120)
HEADS = (64, 128)


def variants(source: str, type: str) -> Iterator[tuple[str, ...]]:
    """The macros of each way to compile a source for a storage type."""
    storage = sources.storage_define(type)
    if source == "attention":
        for head in HEADS:
            yield storage, *attention_shape(head, WIDE[type].itemsize).defines
    elif source == "attention_mma":  # for bfloat16 alone
        yield from ((storage, *mma_defines(head)) for head in HEADS if type == "bfloat16")
    elif source == "attention_cached":
        yield from ((storage, f"HEAD={head}") for head in HEADS)
    elif source == "norm":
        yield from ((storage, *norm_shape(channels, WIDE[type].itemsize)[2]) for channels in CHANNELS)
    else:
        yield (storage,)


def rows(names: list[str], types: list[str], arch: str) -> Iterator[tuple[str | int, ...]]:
    for source in names:
        for type in types:
            for defines in variants(source, type):
                report = nvrtc.compile_cubin(source, defines, arch).report
                size = defines[1] if len(defines) > 1 else ""
                for kernel, used in sorted(nvrtc.resources(report).items()):
                    spills = used.spill_stores + used.spill_loads
                    yield kernel, type, size, used.registers, used.stack, spills, used.shared


def main() -> int:
    parser = argparse.ArgumentParser(description="What each CUDA kernel takes of a GPU.")
    parser.add_argument("source", nargs="*", help="all, if none is named")
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--type", choices=STORAGE, action="append", help="all, if none is named")
    args = parser.parse_args()
    unknown = sorted(set(args.source) - set(sources.names()))
    if unknown:
        parser.error(f"there is no {unknown[0]}.cu; there are {', '.join(sources.names())}")
    line = "{:<34} {:<9} {:<13} {:>9} {:>6} {:>7} {:>7}"
    print(f"{Path(sources.FOLDER).name}/*.cu for {args.arch}; bytes of stack, spills, fixed shared memory\n")
    print(line.format("kernel", "type", "for", "registers", "stack", "spills", "shared"))
    try:
        for row in rows(args.source or sources.names(), args.type or list(STORAGE), args.arch):
            print(line.format(*row))
    except DistgptError as error:
        print(f"kernel_resources: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
