"""The page that `distgpt estimate` prints."""

from __future__ import annotations

import json
from collections.abc import Iterator

import click

from distgpt.measure.estimate.estimate import Facts, Question, estimate
from distgpt.units import count

MARGIN = 13
LONG = {"days": 86400.0, "hours": 3600.0, "minutes": 60.0}
MEMORY = ("weights", "gradients", "moments", "activations", "logits", "validation")


def answer(name: str, question: Question, as_json: bool) -> None:
    """Print the answer on stdout, and on stderr what it waits for."""
    facts = estimate(question, lambda text: click.echo(text, err=True))
    if as_json:
        click.echo(json.dumps({"name": name, **facts}, indent=1))
        return
    threads = f" of {count(facts['threads'], 'thread')}" if facts["threads"] else ""
    click.echo(
        f"{name} on stage {facts['stage']}: {count(facts['ranks'], 'rank')}{threads}, {facts['dtype']}\n"
    )
    for part in (_model, _batch, _memory, _disk, _time):
        for label, text in part(facts):
            click.echo(f"{label:<{MARGIN}}{text}".rstrip())


Rows = Iterator[tuple[str, str]]


def _model(facts: Facts) -> Rows:
    sizes, flops = facts["parameters"], facts["flops_per_token"]
    kinds = ", ".join(f"{kind} {size:,}" for kind, size in sizes["kinds"].items())
    yield "parameters", f"{sizes['total']:,}"
    yield "", kinds
    if sizes["padding"]:
        yield "", f"with {sizes['padding']:,} of padding: {sizes['total'] + sizes['padding']:,}"
    parts = (f"layers {_mega(flops['layers'])}", f"output {_mega(flops['head'])}")
    yield (
        "MFLOP/token",
        (
            f"{_mega(flops['forward'])} forward ({', '.join(parts)}, attention {_mega(flops['attention'])}), "
            f"{_mega(flops['backward'])} backward"
        ),
    )
    whole = flops["forward"] + flops["backward"]
    yield "", f"{_mega(whole)} in all; the usual 6 × parameters gives {_mega(flops['six_n'])}"


def _batch(facts: Facts) -> Rows:
    batch, ranks = facts["batch"], facts["ranks"]
    where = f"on each of {ranks} ranks" if ranks > 1 else "on the only rank"
    yield (
        "batch",
        (
            f"{batch['tokens_per_step']:,} tokens a step: {count(batch['sequences'], 'sequence')} of "
            f"{batch['seq_len']:,}, in {count(batch['rounds'], 'round')} of "
            f"{batch['sequences_per_rank_and_round']} {where}"
        ),
    )
    yield "length", f"{facts['steps']:,} steps, {facts['tokens']:,} tokens"


def _memory(facts: Facts) -> Rows:
    memory = facts["memory"]
    yield "", ""
    yield (
        "memory",
        f"of {'each' if facts['ranks'] > 1 else 'the only'} rank, with --recompute {memory['recompute']}",
    )
    for kind in MEMORY:
        if memory[kind]:
            yield "", f"{kind:<12}{gib(memory[kind]):>11}"
    free = f"  of {gib(memory['free'])} on {memory['where']}" if memory["free"] is not None else ""
    yield "", f"{'together':<12}{gib(memory['total']):>11}{free}"
    if memory["trouble"]:
        yield "", f"too little: {memory['trouble']}"
    elif memory["free"] is None:
        yield "", "chosen as if memory had no end: --gpu-memory GIB tells what a GPU has"
    hows = [key for key in memory["choices"][0] if key != "sequences"]
    yield "", ""
    yield "choices", f"{'sequences at a time':<20}" + "".join(f"{how:>11}" for how in hows) + "   --recompute"
    for row in memory["choices"]:
        mark = "*" if row["sequences"] == facts["batch"]["sequences_per_rank_and_round"] else ""
        yield "", f"{row['sequences']:>10}{mark:<10}" + "".join(f"{gib(row[how]):>11}" for how in hows)
    yield "", ""


def _disk(facts: Facts) -> Rows:
    yield (
        "disk",
        (
            f"a checkpoint {gib(facts['checkpoint_bytes'])}, up to {facts['checkpoints_kept']} are kept; "
            f"the weights alone {gib(facts['weights_file_bytes'])}"
        ),
    )
    if facts["allreduce_bytes"]:
        yield "exchange", f"{gib(facts['allreduce_bytes'])} of gradients, summed over the ranks in every step"


def _time(facts: Facts) -> Rows:
    time, ranks = facts["time"], facts["ranks"]
    if time["rate_per_rank"] is None:
        yield "time", f"not measured{': ' if time['missing'] else ''}{time['missing']}"
        yield "", "for a time, run this where the training will run, or give --rate, one rank's tokens/s"
        return
    flops = f"{three(time['flops_per_s_and_rank'] / 1e12)} TFLOP/s"
    together = f", {time['rate']:,.0f} of {ranks} ranks" if ranks > 1 else ""
    yield "speed", f"{time['rate_per_rank']:,.0f} tokens/s of one rank ({flops}){together}"
    if time["source"] == "measured":
        layers = " and ".join(map(str, time["cuts"]))
        whole = f"{_seconds(time['token_s'])} a token, {_seconds(time['update_s'])} an update"
        yield "", f"measured here, {time['steps']} steps of {layers} layers: {whole}"
    else:
        yield "", "as given with --rate"
    if ranks > 1:
        yield "", "without the exchange, and as if ranks on one machine did not slow each other"
    total = _long(time["total_s"])
    yield "time", f"{_seconds(time['step_s'])} a step, {total} in all, without evaluations and checkpoints"


def _mega(operations: int) -> str:
    return f"{operations / 1e6:,.1f}" if operations < 1e9 else f"{operations / 1e6:,.0f}"


def gib(size: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if size >= factor:
            return f"{three(size / factor)} {unit}"
    return f"{three(size / 2**10)} KiB"


def three(value: float) -> str:
    """With three significant digits, zeros among them, so that numbers below each other can be compared."""
    return f"{value:#.3g}" if abs(value) < 99.95 else f"{value:,.0f}"


def _seconds(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{three(seconds / size)} {unit}"
    return f"{three(seconds / 1e-6)} µs"


def _long(seconds: float) -> str:
    for unit, size in LONG.items():
        if seconds >= 2 * size:
            return f"{three(seconds / size)} {unit}"
    return f"{three(seconds)} seconds"
