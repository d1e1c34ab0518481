"""What more GPUs would bring, by arithmetic: 8 to 4,096 of them, three models, networks of 10 to 400 Gbit/s.

    python benchmarks/scale_on_paper.py            # the published batches
    python benchmarks/scale_on_paper.py --weak 65536

Nothing here is measured but the speed of one GPU: 598,000 tokens/s of GPT-2 124M on an H100, in bfloat16.
Other models are given the same floating-point operations per second. A host has 8 GPUs, which NVLink joins;
hosts are joined at the rate given, that of all ports of a host together. A sum of n bytes over H hosts costs

    in a host        2 n (8 - 1) / 8  bytes at NVLink's rate
    between hosts    2 n (H - 1) / H  bytes at that rate, and 2 ⌈log₂ H⌉ messages

which is how `--grad-sync allreduce` sums on several nodes, and about what NCCL's rings and trees do. What
overlaps with the backward pass is said in predictions.py.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass
from typing import Any

from alphabeta import doublings
from predictions import steps_by_exchange

MEASURED = 598_000  # tokens/s of GPT-2 124M at T = 1,024, one H100
NVLINK = 370e9  # bytes/s that a GPU sends and receives in a sum, of 450e9 by the data sheet
MESSAGE = 15e-6  # seconds that one between hosts takes, whatever its length
GPUS_OF_A_HOST = 8
HBM = 3.35e12  # bytes/s: AdamW reads and writes 28 bytes of each parameter
UPDATE_BYTES = 28


@dataclass(frozen=True)
class Shape:
    name: str
    parameters: float
    n_layer: int
    n_embd: int
    seq_len: int
    batch_tokens: int

    @property
    def flops(self) -> float:
        """Of a token, in both passes: matrices, and attention as if nothing were masked."""
        return 6 * self.parameters + 12 * self.n_layer * self.n_embd * self.seq_len


SHAPES = (
    Shape("124M", 124e6, 12, 768, 1024, 1 << 19),
    Shape("1.5B", 1.56e9, 48, 1600, 1024, 1 << 20),
    Shape("7B", 6.7e9, 32, 4096, 2048, 1 << 22),
)
FLOPS = MEASURED * SHAPES[0].flops  # of one GPU in a second


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512, 4096])
    parser.add_argument("--gbit", type=float, nargs="+", default=[10, 25, 100, 400, 3200], help="of a host")
    parser.add_argument("--weak", type=int, help="tokens of a rank, in place of the published batch")
    args = parser.parse_args()
    ways = list(steps_by_exchange(1, 1, 2, 4, 4, float, float))
    for shape in SHAPES:
        print(f"\n{shape.name}: percent of what so many GPUs would do without any exchange\n")
        print(f"| ranks | Gbit/s | tokens of a rank | {' | '.join(ways)} |\n{'| --- ' * (3 + len(ways))}|")
        for ranks in args.ranks:
            tokens = args.weak or shape.batch_tokens // ranks
            if tokens < shape.seq_len:
                print(f"| {ranks:,} | | less than a sequence {'| ' * len(ways)}|")
                continue
            networks = args.gbit if ranks > GPUS_OF_A_HOST else [math.inf]
            for gbit in networks:
                steps = predicted(shape, tokens, ranks, gbit)
                alone = tokens * shape.flops / FLOPS
                cells = " | ".join(f"{100 * alone / steps[way]:.0f}" for way in ways)
                print(f"| {ranks:,} | {gbit:g} | {tokens:,} | {cells} |".replace("inf", "one host"))


def predicted(shape: Shape, tokens: int, ranks: int, gbit: float) -> dict[str, Any]:
    """Seconds of a step by each way to exchange gradients."""
    passes = tokens * shape.flops / FLOPS
    update = shape.parameters * UPDATE_BYTES / HBM
    hosts = math.ceil(ranks / GPUS_OF_A_HOST)
    inside = min(ranks, GPUS_OF_A_HOST)

    def summed(size: float) -> float:
        between = 2 * size * (hosts - 1) / hosts / (gbit * 1e9 / 8) + 2 * doublings(hosts) * MESSAGE
        return 2 * size * (inside - 1) / inside / NVLINK + between * (hosts > 1)

    return steps_by_exchange(passes, update, ranks, int(4 * shape.parameters), 4, summed, summed, math.inf)


if __name__ == "__main__":
    main()
