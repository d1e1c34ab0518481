"""Settings derived from a depth and the training text by fitted laws (docs/explanation/learning.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from distgpt.core.config import DEEPEST, PARAMETERS_PER_TOKEN

HEAD = 64  # elements of an attention head; the model's width per layer
TOKENS_PER_PARAMETER = 12  # parameters of the layers' matrices and the output layer
# Maximum passes over the training text; more were not tried (docs/explanation/learning.md).
EPOCHS = 8
BYTES_AT_LEAST = 200_000  # enough to learn a vocabulary
SMALLEST_BPE, LARGEST_BPE = 512, 1 << 15
ENTRIES_PER_ROOT = 1.6  # vocabulary size per √bytes, approximately; chosen, not fitted
# English has about 1.9 bytes per token with the smallest BPE, and 0.37 more each time the vocabulary doubles.
SMALLEST_BPE_BYTES, BYTES_PER_DOUBLING = 1.9, 0.37
SMALLEST_BATCH, LARGEST_BATCH = 1 << 9, 1 << 19
REFERENCE_BATCH = 1 << 12  # tokens per step of the presets `fast` and `sprint`
REFERENCE_TOKENS = 12e6  # tokens of a run that uses the reference batch
BATCH_GROWTH = 0.383  # batch ∝ tokens^0.383 (arXiv 2505.13738)
REFERENCE_WIDTH = 256  # width of `fast` and `sprint`
# Learning rates tuned at that batch and width. Their scaling was not swept: lr scales with √batch, and the
# other rates with √(1/width) (docs/explanation/learning.md).
SPRINT_RATES = {"lr": 0.04, "embedding_lr": 0.02, "value_lr": 0.1, "head_lr": 0.0007}
FAST_RATES = {"lr": 0.03, "embedding_lr": 0.3, "value_lr": 0.3, "head_lr": 0.008}
VECTOR_LR = 0.01  # for both, at any size
HIGHEST_LR = 0.05  # the rate of the preset `tiny`
LR_FALLS = 20  # ratio of the peak to the last learning rate
# The weight decay of `fast`, whose 1,000 steps read 4 million tokens. Longer runs decay as much in total.
WEIGHT_DECAY, WEIGHT_DECAY_TOKENS = 0.28, 4e6
# A run with at least this number of passes ends with a pass (docs/explanation/learning.md).
WHOLE_PASSES = 3
LACKING = 0.15  # of the last pass, if the time does not suffice
# Regularization (docs/explanation/learning.md): value embeddings and the output layer decay, at the peak
# learning rate by a factor of exp(-DECAY_PER_PASS) per pass over the text. After CLEAN_PASSES passes, random
# input tokens help. If passes times parameters per token of the text exceed OVERFITS, value embeddings do
# not, and random input tokens help one pass earlier.
DECAY_PER_PASS = 1.4
CLEAN_PASSES, NOISE_PER_PASS, MOST_NOISE = 5, 0.02, 0.2
OVERFITS = 50.0
WARMUP, LONGEST_WARMUP = 25, 100  # one step in 25, at most 100


@dataclass(frozen=True, slots=True)
class Text:
    """Properties of the training text: the approximate number of tokens, and the vocabulary size."""

    tokens: float
    vocab_size: int
    tokenizer: str = ""  # value of --tokenizer to learn one; "": the text has one
    difficulty: float = 1.0  # ratio of bits per byte to the text of the laws


def width(depth: int) -> int:
    return HEAD * depth


def matrices(depth: int) -> int:
    return 12 * depth * width(depth) ** 2


def parameters(depth: int, vocab_size: int) -> int:
    """Count the parameters for the tokens-per-parameter ratio: the layers' matrices and the output layer."""
    return matrices(depth) + vocab_size * width(depth)


def vocabulary(size: float) -> int:
    """Return the BPE vocabulary size for `size` bytes of text: a power of two, about 1.6 √size."""
    if size < BYTES_AT_LEAST:
        return 256
    return min(LARGEST_BPE, max(SMALLEST_BPE, power_of_two(ENTRIES_PER_ROOT * math.sqrt(size))))


def bytes_per_token(vocab_size: int) -> float:
    """Return the approximate number of bytes per token of English."""
    if vocab_size <= 256:
        return 1.0
    return SMALLEST_BPE_BYTES + BYTES_PER_DOUBLING * math.log2(vocab_size / SMALLEST_BPE)


def text_to_learn_from(size: float, entries: int = 0) -> Text:
    """Return the tokens in `size` bytes of text, with `entries` in its vocabulary or the default size."""
    entries = entries or vocabulary(size)
    if entries <= 256:
        return Text(size, entries, "byte")
    return Text(size / bytes_per_token(entries), entries, f"bpe:{entries}")


def context(depth: int, tokens: float) -> int:
    """Return the tokens per sequence. It is smaller for a short text."""
    usual = 256 if depth <= 3 else 512 if depth <= 6 else 1024
    fits = 1 << max(3, int(tokens / 2).bit_length() - 1)
    return min(usual, fits)


def tokens_to_read(depth: int, text: Text) -> float:
    return min(TOKENS_PER_PARAMETER * parameters(depth, text.vocab_size), EPOCHS * text.tokens)


def batch(tokens: float) -> int:
    """Return the tokens per step of a run over `tokens` tokens (arXiv 2505.13738)."""
    best = REFERENCE_BATCH * (tokens / REFERENCE_TOKENS) ** BATCH_GROWTH
    return min(LARGEST_BATCH, max(SMALLEST_BATCH, power_of_two(best)))


def recipe(
    depth: int, tokens: float, text: Text, ranks: int = 1, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the settings of a run over `tokens` tokens, as changes to the preset `fast`.

    Settings in `given` override derived ones, and are the basis of the rest.
    """
    given = given or {}
    seq_len = given.get("seq_len", context(depth, text.tokens))
    sequences = max(1, given.get("batch_tokens", batch(tokens)) // seq_len)
    sequences = given.get("batch_size", -(-sequences // ranks) * ranks)
    steps = given.get("steps", max(1, round(tokens / (sequences * seq_len))))
    larger = math.sqrt(sequences * seq_len / REFERENCE_BATCH)
    narrower = math.sqrt(REFERENCE_WIDTH / width(depth))
    passes = tokens / text.tokens
    from_pairs = starts_from_pairs(tokens, text)
    rates = SPRINT_RATES if from_pairs else FAST_RATES
    lr = min(HIGHEST_LR, rates["lr"] * larger)
    result = {
        "lr": lr,
        "min_lr": lr / LR_FALLS,
        **{name: rates[name] * narrower for name in ("embedding_lr", "value_lr", "head_lr")},
        "vector_lr": VECTOR_LR,
        "weight_decay": WEIGHT_DECAY * larger * min(1.0, WEIGHT_DECAY_TOKENS / tokens),
    }
    if not from_pairs:
        result["table_decay"] = -math.expm1(-DECAY_PER_PASS * sequences * seq_len / text.tokens) / lr
    overfits = passes * parameters(depth, text.vocab_size) / text.tokens > OVERFITS
    noisy = passes - (CLEAN_PASSES - 1 if overfits else CLEAN_PASSES)
    if noisy > 0 and not given.get("pack"):
        result["input_noise"] = min(MOST_NOISE, NOISE_PER_PASS * noisy)
    if round(passes) >= WHOLE_PASSES and "steps" not in given:
        result["epochs"] = round(passes)
    return {
        "n_layer": depth,
        "n_head": depth,
        "n_embd": width(depth),
        "seq_len": seq_len,
        "window": 0 if from_pairs else seq_len // 4,
        **({"tokenizer": text.tokenizer} if text.tokenizer else {}),
        "batch_size": sequences,
        "steps": steps,
        "warmup": min(LONGEST_WARMUP, math.ceil(steps / WARMUP)),
        "init_weights": "bigrams" if from_pairs else "unit",
        "value_embeddings": not overfits,
        "previous_embedding": not overfits,
        **{name: float(f"{value:.3g}") for name, value in result.items()},
    }


def starts_from_pairs(tokens: float, text: Text) -> bool:
    """Return whether a run over `tokens` tokens learns more from initial weights from token pairs."""
    return tokens <= min(PAIRS_UP_TO, PAIR_RUN_PASSES * text.tokens)


def power_of_two(value: float) -> int:
    return 1 << max(0, round(math.log2(max(1.0, value))))


# --within: find the depth with the lowest loss after a given time


@dataclass(frozen=True, slots=True)
class Law:
    """Bits per byte = E + A / parameters^a + B / tokens^b, with only the parameters of the layers' matrices.

    Both laws were fitted to one text with `LAWS_VOCABULARY` entries. Tokens of a smaller vocabulary have
    fewer bytes and count in proportion.
    """

    E: float
    A: float
    a: float
    B: float
    b: float

    def bits_per_byte(self, parameters: float, tokens: float) -> float:
        return self.E + self.A / math.pow(parameters, self.a) + self.B / math.pow(tokens, self.b)


PAIRS_LAW = Law(E=0.0457, A=4.9509, a=0.3, B=4.212, b=0.065)  # runs with initial weights from pairs
LAW = Law(E=0.66, A=17.3338, a=0.3, B=249.1379, b=0.4)  # longer runs; see docs/explanation/learning.md
LAWS_VOCABULARY = 8192
# Repeated passes teach less (the form of arXiv 2305.16264, which has 15 for larger texts): from the second
# pass on, the gain falls to 1/e after 3 passes. All together are worth at most 3 passes over new text.
REPEATED = 3.0
# Initial weights from pairs are better in runs up to this number of tokens and passes.
PAIRS_UP_TO, PAIR_RUN_PASSES = 2e6, 2
PAIR_PASSES, PAIR_ROWS = 15, 1 << 13  # initial weights from pairs: passes over all pairs, maximum tokens
SLOWER_PAIRS = 3.0  # time per FLOP, compared with training


# Ensembles (docs/explanation/learning.md). Their matrices grow with the square of their width.
ENSEMBLE_GAIN, LARGEST_ENSEMBLE, WIDEST_ENSEMBLE = 0.04, 8, 1024
SHORTEST_MEMBER = 60.0  # seconds
SHARED = 0.04  # of the time, to measure speeds, and to write and evaluate an ensemble


class Choice(NamedTuple):
    """A depth, with the tokens it reads, the time it takes in seconds, and the bits per byte to expect.

    Tokens and time are of each model of an ensemble, and bits per byte of the ensemble.
    """

    depth: int
    tokens: float
    seconds: float
    bits_per_byte: float
    ensemble: int = 1  # number of models


def expected_bits(depth: int, tokens: float, text: Text) -> float:
    """Return the expected bits per byte of a model after `tokens` tokens, including repeated ones."""
    repeated = max(0.0, tokens / text.tokens - 1)
    new = min(tokens, text.tokens) + text.tokens * REPEATED * (1 - math.exp(-repeated / REPEATED))
    law = PAIRS_LAW if new <= PAIRS_UP_TO else LAW
    same = bytes_per_token(text.vocab_size) / bytes_per_token(LAWS_VOCABULARY)
    return text.difficulty * law.bits_per_byte(matrices(depth), same * new)


def flops(depth: int, text: Text) -> float:
    """Return the training FLOPs per token, of the matrices and of attention."""
    return 6.0 * (parameters(depth, text.vocab_size) + depth * width(depth) * context(depth, text.tokens))


def pair_flops(depth: int, text: Text) -> float:
    """Return the FLOPs of learning initial weights from pair counts (recipes/bigrams.py)."""
    return 6.0 * PAIR_PASSES * min(PAIR_ROWS, text.vocab_size) * text.vocab_size * width(depth)


def speed(depth: int, measured: Mapping[int, float], text: Text) -> float:
    """Return a depth's tokens/s: log-log interpolation over FLOPs from the nearest measured depths."""
    near = sorted(sorted(measured, key=lambda known: abs(known - depth))[:2])
    at, *places = (math.log(flops(each, text)) for each in (depth, *near))
    rates = [math.log(measured[each]) for each in near]
    if len(near) == 1:
        return math.exp(rates[0] - (at - places[0]))
    slope = min(0.0, max(-1.0, (rates[1] - rates[0]) / (places[1] - places[0])))
    nearest = min(range(2), key=lambda i: abs(places[i] - at))
    return math.exp(rates[nearest] + slope * (at - places[nearest]))


def ensemble_factor(size: int) -> float:
    """Return the ratio of an ensemble's bits per byte to those of one of its `size` models."""
    return 1 - ENSEMBLE_GAIN * (1 - 1 / size)


def member_seconds(seconds: float, size: int) -> float:
    """Return the time of each model of an ensemble that may take `seconds`."""
    return seconds if size == 1 else (1 - SHARED) * seconds / size


def choose(
    seconds: float, measured: Mapping[int, float], text: Text, only: int = 0, ensemble: int = 0
) -> Choice:
    """Return the depth and the ensemble with the lowest expected loss after `seconds`.

    `measured`: tokens/s of some depths. `only` and `ensemble`: a given depth and number of models; 0: any.
    """
    fitting = [
        depth
        for depth in range(1, DEEPEST + 1)
        if depth == 1 or parameters(depth, text.vocab_size) <= PARAMETERS_PER_TOKEN * text.tokens
    ]

    def fits(depth: int, size: int) -> bool:
        return size * width(depth) <= WIDEST_ENSEMBLE and member_seconds(seconds, size) >= SHORTEST_MEMBER

    def choice(depth: int, size: int) -> Choice:
        rate, most, limit = speed(depth, measured, text), EPOCHS * text.tokens, member_seconds(seconds, size)
        pairs = SLOWER_PAIRS * pair_flops(depth, text) / (rate * flops(depth, text))  # seconds

        def reading(tokens: float) -> Choice:
            before = pairs if starts_from_pairs(tokens, text) else 0.0
            end = min(limit, before + most / rate)
            bits = ensemble_factor(size) * expected_bits(depth, tokens, text)
            return Choice(depth, tokens, end, bits, size)

        passes = math.floor(min(most, limit * rate) / text.tokens + LACKING)
        if passes >= WHOLE_PASSES:
            most = passes * text.tokens
        tokens = max(1.0, min(most, limit * rate))
        if starts_from_pairs(tokens, text):
            return reading(max(1.0, min(tokens, max(limit - pairs, limit / 20) * rate)))
        if not starts_from_pairs(PAIRS_UP_TO, text):
            return reading(tokens)
        # A run slightly longer than PAIRS_UP_TO may end with a lower loss if it stops there and uses pairs.
        return min(reading(tokens), reading(PAIRS_UP_TO), key=lambda each: each.bits_per_byte)

    choices = (
        choice(depth, size)
        for depth in ([only] if only else fitting)
        for size in ([ensemble] if ensemble else range(1, LARGEST_ENSEMBLE + 1))
        if size == (ensemble or 1) or fits(depth, size)
    )
    return min(choices, key=lambda each: each.bits_per_byte)
