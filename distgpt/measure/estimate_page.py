"""What `distgpt estimate` prints: its facts as a page for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from distgpt.formatting import count, duration, long_duration, size, size_in_column, three_digits

Facts = dict[str, Any]
Rows = Iterator[tuple[str, str]]

MARGIN = 13  # width of the page's first column
FLOPS = {"layers": "layers", "output": "head", "attention": "attention"}
MEMORY = ("weights", "gradients", "moments", "activations", "logits", "validation", "exchange")


def page(name: str, facts: Facts) -> str:
    """The facts for people."""
    threads = f" of {count(facts['threads'], 'thread')}" if facts["threads"] else ""
    title = f"{name} on stage {facts['stage']}: {count(facts['ranks'], 'rank')}{threads}, {facts['dtype']}"
    rows = (row for part in (_model, _batch, _memory_rows, _disk, _time_rows) for row in part(facts))
    return "\n".join([title, "", *(f"{label:<{MARGIN}}{text}".rstrip() for label, text in rows)])


def _model(facts: Facts) -> Rows:
    sizes, flops = facts["parameters"], facts["flops_per_token"]
    yield "parameters", f"{sizes['total']:,}"
    yield "", ", ".join(f"{kind} {n:,}" for kind, n in sizes["kinds"].items())
    if sizes["padding"]:
        yield "", f"with {sizes['padding']:,} of padding: {sizes['total'] + sizes['padding']:,}"
    parts = [f"{name} {_mega(flops[key])}" for name, key in FLOPS.items()]
    forward = f"{_mega(flops['forward'])} forward ({', '.join(parts)})"
    yield "MFLOP/token", f"{forward}, {_mega(flops['backward'])} backward"
    total = _mega(flops["forward"] + flops["backward"])
    yield "", f"{total} in total; the usual 6 × parameters gives {_mega(flops['six_n'])}"


def _batch(facts: Facts) -> Rows:
    batch, ranks = facts["batch"], facts["ranks"]
    where = f"on each of {ranks} ranks" if ranks > 1 else "on the only rank"
    sequences = f"{count(batch['sequences'], 'sequence')} of {batch['seq_len']:,}"
    micro = count(batch["rounds"], "micro-batch")
    yield "batch", f"{batch['tokens_per_step']:,} tokens per step: {sequences}"
    yield "", f"in {micro} of {batch['sequences_per_rank_and_round']} {where}"
    yield "length", f"{facts['steps']:,} steps, {facts['tokens']:,} tokens"


def _memory_rows(facts: Facts) -> Rows:
    memory = facts["memory"]
    yield "", ""
    rank = "each rank" if facts["ranks"] > 1 else "the only rank"
    yield "memory", f"of {rank}, with --recompute {memory['recompute']}"
    for kind in MEMORY:
        if memory[kind]:
            yield "", f"{kind:<12}{size_in_column(memory[kind]):>11}"
    free = f"  of {size_in_column(memory['free'])} on {memory['where']}" if memory["free"] is not None else ""
    yield "", f"{'total':<12}{size_in_column(memory['total']):>11}{free}"
    if memory["copy"]:
        where = "on rank 0, to save while training goes on, if there is room"
        yield "", f"{'a copy':<12}{size_in_column(memory['copy']):>11}  {where}"
    if memory["trouble"]:
        yield "", f"too little: {memory['trouble']}"
    elif memory["free"] is None:
        yield "", "chosen for unlimited memory: give the GPU's with --gpu-memory GIB"
    hows = [key for key in memory["choices"][0] if key != "sequences"]
    yield "", ""
    yield "choices", f"{'sequences at once':<20}" + "".join(f"{how:>11}" for how in hows) + "   --recompute"
    for row in memory["choices"]:
        mark = "*" if row["sequences"] == facts["batch"]["sequences_per_rank_and_round"] else ""
        sizes = "".join(f"{size_in_column(row[how]):>11}" for how in hows)
        yield "", f"{row['sequences']:>10}{mark:<10}{sizes}"
    yield "", ""


def _disk(facts: Facts) -> Rows:
    checkpoint, weights = (size(facts[key]) for key in ("checkpoint_bytes", "weights_file_bytes"))
    kept = f"up to {facts['checkpoints_kept']} are kept"
    yield "disk", f"a checkpoint {checkpoint}, {kept}; the weights alone {weights}"
    if facts["allreduce_bytes"]:
        every = facts["allreduce_every"]
        what = "gradients in each step" if every == 1 else f"changes of weights in every {every} steps"
        yield "allreduce", f"{size(facts['allreduce_bytes'])} of {what}"


def _time_rows(facts: Facts) -> Rows:
    time, ranks = facts["time"], facts["ranks"]
    if time["rate_per_rank"] is None:
        yield "time", f"not measured{': ' if time['missing'] else ''}{time['missing']}"
        yield "", "for a time, run this where you will train, or give one rank's tokens/s with --rate"
        return
    flops = f"{three_digits(time['flops_per_s_and_rank'] / 1e12)} TFLOP/s"
    together = f", {time['rate']:,.0f} of {ranks} ranks" if ranks > 1 else ""
    yield "speed", f"{time['rate_per_rank']:,.0f} tokens/s of one rank ({flops}){together}"
    if time["source"] == "measured":
        layers = " and ".join(map(str, time["cuts"]))
        whole = f"{duration(time['token_s'])} per token, {duration(time['update_s'])} per update"
        yield "", f"measured here, {time['steps']} steps of {layers} layers: {whole}"
    else:
        yield "", "as given with --rate"
    if ranks > 1:
        yield "", "without the allreduce, and as if ranks on one machine did not slow each other down"
    total = long_duration(time["total_s"])
    step = duration(time["step_s"])
    yield "time", f"{step} per step, {total} in total, without evaluations and checkpoints"


def _mega(operations: int) -> str:
    return f"{operations / 1e6:,.1f}" if operations < 1e9 else f"{operations / 1e6:,.0f}"
