"""--depth: derive the settings of a new run from a depth and the text. Only on rank 0."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from distgpt.core.base.errors import UsageError, reject_combination
from distgpt.core.base.formatting import PREFIXES, clock, count, scaled, three_digits
from distgpt.core.config import BATCH_IN_TOKENS, BATCH_TOKENS, DEEPEST, SETTINGS, RunConfig
from distgpt.core.config.run_request import RunRequest
from distgpt.core.data.textfile import resolve_data
from distgpt.core.data.tokenizers import AUTO
from distgpt.core.train.plan import begins_anew
from distgpt.corpora.mixture import paths_of
from distgpt.corpora.prepare.documents import FIELD, TEXT, Input, Offset, find_inputs, opened, parts, pieces
from distgpt.corpora.prepare.tokenized import vocabulary_size
from distgpt.corpora.shards import ShardTokens, is_shards, read_manifest, shards_tokenizer
from distgpt.recipes.scaling import (
    Text,
    bytes_per_token,
    parameters,
    recipe,
    text_to_learn_from,
    tokens_to_read,
)

DEPTH_PRESET = "fast"  # preset to which the laws were fitted
BYTES_PER_WORD = 6
# Runs with a time limit: the number of evaluations of trained weights, and the number of tokens to train on
# per evaluated token. Training takes twice as long per token.
EVALUATIONS, VAL_SHARE = 6, 5
LEAST_VAL_TOKENS = 1 << 12
UNPACKED = 3  # compression ratio, approximately
SAMPLES, SAMPLE = 16, 1 << 16  # number and bytes; zlib's window is half a sample
PACKED_REFERENCE = 2.73  # bits per byte of zlib for the text of the laws, less 2%: see below
# Models differ less between data sets than zlib. Both constants fit five of them
# (docs/explanation/learning.md).
EXPONENT = 0.75
EASIEST, HARDEST = 0.5, 1.7  # slightly beyond the range of real data; a few bytes may compress to anything
# Settings of the user that determine others.
FOLLOWED = {"data", "tokenizer", "vocab_size", "seq_len", "batch_size", BATCH_TOKENS, "steps"}


def titled(request: RunRequest) -> RunRequest:
    """Return the request, titled with the preset of --depth unless it has another name."""
    if request.given.get("chats"):  # tune sets the title
        return request
    return replace(request, title=request.name if request.preset or request.toml else DEPTH_PRESET)


def with_depth(request: RunRequest, ranks: int) -> RunRequest:
    """Return the request with the settings derived from its depth. Only on rank 0."""
    layers = {"n-layer": request.settings().get("n_layer")}
    reject_combination("--within" if request.tokens else "--depth", layers, "both set the number of layers")
    depth, request = request.depth or 0, replace(titled(request), depth=None)
    if not begins_anew(request):  # a resumed run keeps its settings, so the same depth is the same model
        return replace(request, given={"n_layer": depth, **request.given})
    if request.preset not in (None, DEPTH_PRESET):
        raise UsageError(f"--depth requires the preset {DEPTH_PRESET}; omit --preset {request.preset}")
    return replace(
        request, preset=DEPTH_PRESET, derived=settings_of(depth, request.settings(), request.tokens, ranks)
    )


def settings_of(depth: int, given: Mapping[str, Any], tokens: float = 0.0, ranks: int = 1) -> dict[str, Any]:
    """Return the settings derived from a depth, as changes to the preset. `given`: the user's settings.

    `tokens` to read; 0: as many as the depth needs.
    """
    if type(depth) is not int or not 1 <= depth <= DEEPEST:
        raise UsageError(f"--depth must be at least 1 and at most {DEEPEST}, not {depth!r:.80}")
    for name in FOLLOWED & given.keys():
        (BATCH_IN_TOKENS if name == BATCH_TOKENS else SETTINGS[name]).check(name, given[name])
    reject_combination("--depth", {"init": given.get("init")}, "the weights set the depth")
    text = text_of(given)
    result = recipe(depth, tokens or tokens_to_read(depth, text), text, ranks, given)
    if tokens and holds_out(given):
        result |= _evaluations(tokens, result["steps"], held_out_tokens(given, text))
    return result


def described(run: RunConfig) -> str:
    """Return a table of the settings derived from a run's depth."""
    model, t = run.model, run.train
    given = {"data": t.data, "tokenizer": t.tokenizer, "val_fraction": t.val_fraction}
    text = text_of({**given, "vocab_size": model.vocab_size})
    size, per_step = parameters(model.n_layer, text.vocab_size), t.batch_size * model.seq_len
    read = per_step * t.steps
    tokenizer = "the shards'" if any(map(is_shards, paths_of(t.data))) else t.tokenizer
    noise = f" with {t.input_noise:.0%} random input tokens" if t.input_noise else ""
    limit = " at most" if t.epochs else ""
    until = f", for{limit} {clock(60 * t.train_minutes)}" if t.train_minutes else ""
    passes = t.epochs or read / text.tokens
    about = "about " if t.epochs else ""  # the steps of its epochs are known once the text is tokenized
    rows = {
        f"depth {model.n_layer}": f"width {model.n_embd}, {model.n_head} heads, context {model.seq_len}",
        "text": f"about {_about(text.tokens)} tokens; tokenizer {tokenizer}, {text.vocab_size:,} entries",
        "training": f"reads {_about(read)} tokens, the text {three_digits(passes)} times{noise};"
        f" {three_digits(read / size)} for each of {_about(size)} parameters (layers and output layer)",
        "steps": f"{about}{count(t.steps, 'step')} of {per_step:,} tokens{until};"
        f" lr {t.lr:g}, warm-up {t.warmup}",
    }
    return "\n".join(f"{name:<10}{what}" for name, what in rows.items())


def _evaluations(tokens: float, steps: int, held_out: float) -> dict[str, Any]:
    """Return settings that evaluate a run with a time limit a few times, in a small share of its time.

    The curve then shows when the run starts to overfit, and the best weights are kept. Each evaluation
    scores all tokens, so that runs can be compared, unless not even one at the end fits.
    """
    fitting = int(tokens / VAL_SHARE / max(1.0, held_out))
    if not fitting:
        most = max(LEAST_VAL_TOKENS, int(tokens / VAL_SHARE / (EVALUATIONS + 1)))
        return {"eval_every": max(1, steps // EVALUATIONS), "val_tokens": most}
    times = min(EVALUATIONS, fitting - 1)
    return {"eval_every": -(-steps // times) if times else 0, "val_tokens": 0}  # if 0, only at the end


def held_out_tokens(given: Mapping[str, Any], text: Text) -> float:
    """Return about how many tokens these settings hold out for validation."""
    known, paths = {**given, "vocab_size": text.vocab_size}, paths_of(given.get("data", "corpus"))
    if fraction := float(given.get("val_fraction", 0.0)):
        return sum(_text_at(path, known).tokens for path in paths) * fraction / max(1e-6, 1 - fraction)
    if given.get("val"):
        path = resolve_data(given["val"])
        return (is_shards(path) and read_manifest(path).tokens("val")) or _text_at(path, known).tokens
    return sum(read_manifest(path).tokens("val") for path in paths if is_shards(path))


def holds_out(given: Mapping[str, Any]) -> bool:
    """Return whether these settings hold out validation data."""
    if given.get("val") or given.get("val_fraction"):
        return True
    paths = paths_of(given.get("data", "corpus"))
    return any(is_shards(path) and bool(read_manifest(path).of("val")) for path in paths)


def text_of(given: Mapping[str, Any]) -> Text:
    """Return the size of the text in these settings, estimated from the bytes of its files."""
    shares, tokenizer = paths_of(given.get("data", "corpus")), given.get("tokenizer", AUTO)
    path, *others = shares
    if not others:
        return _text_at(path, given)
    entries = given.get("vocab_size", 0)
    if shards := [path for path in shares if is_shards(path)]:
        whole = _text_at(shards[0], given)
    elif tokenizer == AUTO:
        whole = text_to_learn_from(sum(_bytes_at(path, given) for path in shares), entries)
    else:
        whole = Text(1.0, entries or vocabulary_size(tokenizer, *shares))
    known = {**given, "vocab_size": whole.vocab_size}
    # One pass over this number of tokens reads the average sequence once.
    passes = sum(share * share / _text_at(path, known).tokens for path, share in shares.items())
    return replace(whole, tokens=1 / passes)


def _bytes_at(path: Path, given: Mapping[str, Any]) -> float:
    files, held_out = find_inputs((path,)), float(given.get("val_fraction", 0.0))
    return max(1.0, (1 - held_out) * sum(file.bytes * (UNPACKED if file.compressed else 1) for file in files))


def _text_at(path: Path, given: Mapping[str, Any]) -> Text:
    if is_shards(path):
        manifest = read_manifest(path)
        return Text(max(1, manifest.tokens("train")), manifest.vocab_size)
    size, tokenizer, entries = (
        _bytes_at(path, given),
        given.get("tokenizer", AUTO),
        given.get("vocab_size", 0),
    )
    if tokenizer == AUTO:
        return text_to_learn_from(size, entries)
    entries = entries or vocabulary_size(tokenizer, path)
    if tokenizer in ("byte", "char"):
        return Text(size, entries)
    return Text(size / (BYTES_PER_WORD if tokenizer == "word" else bytes_per_token(entries)), entries)


def _about(number: float) -> str:
    value, prefix = scaled(number, PREFIXES)
    return f"{three_digits(value)} {prefix}" if prefix else f"{number:.0f}"


def difficulty(path: Path) -> float:
    """Return the ratio of bits per byte that a model needs here to the laws' own text."""
    samples = list(_of_shards(path) if is_shards(path) else _of_files(find_inputs((path,))))
    size = sum(map(len, samples))
    if not size:
        return 1.0
    packed = 8 * sum(len(zlib.compress(each, 9)) for each in samples) / size
    return min(HARDEST, max(EASIEST, float((packed / PACKED_REFERENCE) ** EXPONENT)))


def _of_files(inputs: list[Input]) -> Iterator[bytes]:
    """Yield samples spread over the files."""
    chosen = inputs[:: -(-len(inputs) // SAMPLES)]
    each = -(-SAMPLES // len(chosen))
    for source in chosen:
        if source.kind == TEXT and not source.compressed:
            yield from _of_text(source, each)
        elif piece := next(pieces([source], FIELD, Offset()), None):
            text = "".join(part for part, _ in parts(piece, FIELD)).encode()
            yield from (text[start : start + SAMPLE] for start in range(0, len(text), SAMPLE)[:each])


def _of_text(source: Input, count: int) -> Iterator[bytes]:
    apart = max(SAMPLE, source.bytes // count)
    for start in range(0, source.bytes, apart):
        with opened(source, start) as (stream, _):
            yield stream.read(SAMPLE)


def _of_shards(folder: Path) -> Iterator[bytes]:
    manifest = read_manifest(folder)
    tokenizer, tokens = shards_tokenizer(folder, manifest), ShardTokens(folder, manifest, "train")
    length = int(SAMPLE / bytes_per_token(manifest.vocab_size))
    for start in range(0, len(tokens), max(length, len(tokens) // SAMPLES)):
        yield tokenizer.decode(tokens.read(start, min(start + length, len(tokens)))).encode()
