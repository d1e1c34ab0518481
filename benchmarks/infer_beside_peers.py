"""Compare `distgpt bench infer` with transformers, CTranslate2 and llama.cpp: GPT-2 with random weights.

    python benchmarks/infer_beside_peers.py --requests 1 --peer llama.cpp --peer-python PYTHON

Accepts the options of `distgpt bench infer`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import click
from peer_process import ask_peer
from record import end_with_errors

from distgpt.commands import bench
from distgpt.core.base.errors import UsageError
from distgpt.core.config import ModelConfig, did_you_mean
from distgpt.measure.bench.infer import (
    OURS,
    InferOptions,
    blocks,
    config_of,
    job_of,
    measure,
    own_seconds,
)
from distgpt.measure.jobs import Row, say

PEERS = {
    "transformers": ("float32", "bfloat16"),
    "ctranslate2": ("float32", "int8"),
    "llama.cpp": ("float32", "bfloat16", "q8_0", "q4_0"),
}
# configuration key of the model: key in a request to peer_inference.py
SIZES = {
    "vocab_size": "vocab",
    "seq_len": "context",
    "n_embd": "width",
    "n_layer": "layers",
    "n_head": "heads",
}


@dataclass(frozen=True, slots=True)
class PeerOptions(InferOptions):
    peers: Sequence[str] = ()
    peer_python: str = sys.executable


@click.command("infer_beside_peers.py", help=__doc__, context_settings={"show_default": True})
@bench.infer_options
@click.option(
    *("--peer", "peers"),
    multiple=True,
    required=True,
    metavar="NAME",
    help=f"{', '.join(PEERS)}. Repeatable.",
)
@click.option("--peer-python", default=sys.executable, help="Python with the peers.")
def main(**given: Any) -> None:
    options = bench.to_options(PeerOptions, given)
    found = beside_peers(options)
    options.finish("infer", options.preset, found, blocks(found))


def beside_peers(options: PeerOptions) -> dict[str, Any]:
    job = job_of(options)
    options.prepare()
    with tempfile.TemporaryDirectory(prefix=".models-", dir=options.out.resolve()) as folder:
        there = {"folder": folder, "shape": shape_of(config_of(options.preset))}
        refuse_missing(options, job | there)
        sides = [(OURS, dtype) for dtype in options.dtypes]
        sides += [(name, dtype) for name in options.peers for dtype in PEERS[name]]

        def seconds(who: str, asked: Row) -> dict[str, Any]:
            if who == OURS:
                return own_seconds(asked)
            return ask_peer(options.peer_python, "measure", asked | there | {"peer": who}, "peer_inference")

        return measure(options, sides, job, seconds)


def shape_of(config: ModelConfig) -> dict[str, int]:
    sizes = {name: getattr(config, name) for name in SIZES}
    if config != ModelConfig(**sizes):
        raise UsageError("peers are measured on GPT-2's architecture: choose --preset gpt2")
    return {theirs: sizes[ours] for ours, theirs in SIZES.items()}


def refuse_missing(options: PeerOptions, job: Row) -> None:
    """Create the model in the format of each peer. Raise UsageError if a package is missing."""
    for name in options.peers:
        if name not in PEERS:
            raise UsageError(f"unknown peer {name!r}{did_you_mean(name, PEERS)}")
    say("a model for the peers")
    there = ask_peer(options.peer_python, "models", job, "peer_inference")["peers"]
    if missing := [name for name in options.peers if name not in there]:
        raise UsageError(f"{options.peer_python} lacks what {missing[0]} needs: choose another --peer-python")


if __name__ == "__main__":
    end_with_errors(main)
