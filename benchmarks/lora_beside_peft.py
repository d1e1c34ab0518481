"""`distgpt train --lora-rank` beside PEFT on cores: the same shape, in turn, and their ratio.

    python benchmarks/lora_beside_peft.py --peer-python PYTHON

Weights are random. A turn is a process of each, whose fastest step after the first counts.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
from peer_process import PEERS

import distgpt
from distgpt.cluster.jobs.processes import run
from distgpt.core.comm.resources import usable_cores
from distgpt.core.config.presets import preset
from distgpt.measure.jobs import answer, unsteered

KEEP = {"MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_MMAP_MAX_": "0"}
MODES = {  # of PEFT: the type of its adapters, compiled, freed memory kept
    "eager": ("float32", False, False),
    "narrow": ("bfloat16", False, False),
    "narrow+keep-freed": ("bfloat16", False, True),
    "narrow+compile+keep-freed": ("bfloat16", True, True),
}


@click.command(help=__doc__)
@click.option("--peer-python", default=sys.executable, help="A Python with torch, transformers and peft.")
@click.option("--preset", "shape", default="smollm2-135m", show_default=True)
@click.option("--rank", default=16, show_default=True)
@click.option("--batch-size", default=8, show_default=True)
@click.option("--seq-len", default=512, show_default=True)
@click.option("--steps", default=4, show_default=True)
@click.option("--turns", default=2, show_default=True)
@click.option("--mode", "modes", multiple=True, type=click.Choice(list(MODES)), default=list(MODES)[1:3])
def main(peer_python: str, turns: int, modes: tuple[str, ...], **asked: Any) -> None:
    asked["threads"] = len(usable_cores())
    found: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "weights.safetensors"
        distgpt.init(preset(asked["shape"], {"seq_len": asked["seq_len"]}).model).save(weights)
        for turn in range(turns):
            ours = own(weights, Path(folder) / f"run{turn}", asked)
            found.setdefault("distgpt", []).append(ours)
            for mode in modes:
                found.setdefault(f"PEFT {mode}", []).append(theirs(peer_python, mode, asked))
            for name, each in found.items():
                print(
                    f"{name:32} {each[-1]['tokens_per_s']:8.0f} tokens/s {each[-1]['peak'] / 1e6:8.0f} MB",
                    flush=True,
                )
    best = {name: max(each["tokens_per_s"] for each in every) for name, every in found.items()}
    peak = {name: min(each["peak"] for each in every) for name, every in found.items()}
    for name in list(found)[1:]:
        speed, memory = best["distgpt"] / best[name], peak["distgpt"] / peak[name]
        print(f"distgpt : {name}: {speed:.2f} x the speed, {memory:.2f} x the memory")


def own(weights: Path, out: Path, asked: dict[str, Any]) -> dict[str, float]:
    """Train adapters in a process of its own."""
    words = [
        "train",
        "--init",
        weights,
        "--lora-rank",
        asked["rank"],
        "--dtype",
        "bfloat16",
        "--data",
        "corpus",
    ]
    words += ["--tokenizer", "byte", "--batch-size", asked["batch_size"], "--seq-len", asked["seq_len"]]
    words += ["--steps", asked["steps"], "--save-every", "end", "--out", out, "--threads", asked["threads"]]
    ended = run([sys.executable, "-m", "distgpt", *map(str, words)], env=unsteered())
    if ended.code:
        raise SystemExit(ended.output)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rates = [line["tokens_per_s"] for line in lines if "tokens_per_s" in line]
    return {
        "tokens_per_s": max(rates[1:]),
        "peak": max(json.loads((out / "summary.json").read_text())["peak_memory"]),
    }


def theirs(python: str, mode: str, asked: dict[str, Any]) -> dict[str, float]:
    """The same shape by PEFT."""
    c = preset(asked["shape"]).model
    config = {"vocab_size": c.vocab_size, "hidden_size": c.n_embd, "intermediate_size": c.hidden}
    config |= {"num_hidden_layers": c.n_layer, "num_attention_heads": c.n_head, "rms_norm_eps": c.norm_eps}
    config |= {"num_key_value_heads": c.kv_heads, "head_dim": c.head_size, "tie_word_embeddings": c.tied}
    adapters, compiled, kept = MODES[mode]
    request = {**asked, "config": config, "adapters": adapters, "compile": compiled}
    words = [python, PEERS / "peer_peft.py", json.dumps(request)]
    said = answer(run(words, env=unsteered() | (KEEP if kept else {})), "PEFT")
    tokens = asked["batch_size"] * asked["seq_len"]
    return {"tokens_per_s": tokens / min(said["seconds"][1:]), "peak": said["peak_memory"]}


if __name__ == "__main__":
    main()
