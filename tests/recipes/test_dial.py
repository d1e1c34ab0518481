"""One dial: what follows from a depth and a text, how hard it is, and which depth is chosen for a time."""

import gzip
import json
import math
import random
import string

import pytest
from distgpt.core.config.presets import PRESETS, preset
from distgpt.core.data.loading import resolve_data
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.corpora.tokenizers.bpe import learned_size
from distgpt.recipes.depth import EASIEST, HARDEST, difficulty
from distgpt.recipes.scaling import (
    FAST_RATES,
    REFERENCE_WIDTH,
    SPRINT_RATES,
    WEIGHT_DECAY,
    Text,
    batch,
    choose,
    context,
    expected_bits,
    flops,
    matrices,
    pair_flops,
    parameters,
    recipe,
    speed,
    text_to_learn_from,
    tokens_to_read,
    vocabulary,
)

from conftest import inside

DOCS = Text(9.7e6, 8192)


def test_the_laws_of_sizes():
    """Tokens go with the parameters, but not past a few epochs; batches are powers of two."""
    assert (matrices(4), parameters(4, 8192)) == (12 * 4 * 256**2, 12 * 4 * 256**2 + 8192 * 256)
    sizes = [vocabulary(size) for size in (70e3, 199e3, 201e3, 1e6, 30e6, 1e12)]
    assert sizes == [256, 256, 512, 2048, 8192, 32768]
    assert text_to_learn_from(70e3) == Text(70e3, 256, "byte")
    assert text_to_learn_from(30e6).tokenizer == "bpe:8192"
    assert text_to_learn_from(30e6, 4096).vocab_size == 4096
    assert tokens_to_read(3, DOCS) == 12 * parameters(3, 8192)
    assert tokens_to_read(6, DOCS) == 8 * DOCS.tokens
    found = [batch(tokens) for tokens in (1e3, 2e5, 12e6, 200e6, 1e15)]
    assert found == [512, 1024, 4096, 16384, 1 << 19]
    assert [context(depth, 1e7) for depth in (1, 3, 4, 6, 7)] == [256, 256, 512, 512, 1024]
    assert context(7, 100) == 32 and context(7, 3) == 8


def test_the_recipe_is_a_run_and_follows_what_is_given():
    found = recipe(4, 12e6, DOCS)
    run = preset("fast", found)
    assert (run.model.n_embd, run.model.n_head, run.model.seq_len) == (256, 4, 512)
    assert (run.train.lr, run.train.embedding_lr, run.train.head_lr) == (0.03, 0.3, 0.008)
    short = preset("fast", recipe(4, 1e6, DOCS, given={"batch_tokens": 4096}))
    assert (short.model.init_weights, run.model.init_weights) == ("bigrams", "unit")
    assert (short.train.lr, short.train.embedding_lr, short.train.head_lr) == (0.04, 0.02, 0.0007)
    assert (short.model.windows, run.model.windows) == ([0] * 4, [128, 128, 128, 0])
    assert run.train.steps * run.train.batch_size * 512 == pytest.approx(12e6, rel=0.01)
    assert recipe(4, 12e6, DOCS, given={"batch_tokens": 16384})["lr"] == 0.05
    assert recipe(4, 12e6, DOCS, given={"seq_len": 256})["batch_size"] == 16
    assert recipe(4, 12e6, DOCS, given={"steps": 50})["warmup"] == 2
    assert recipe(4, 12e6, DOCS, ranks=3)["batch_size"] == 9  # 8 cannot be shared
    for name, rates in (("fast", FAST_RATES), ("sprint", SPRINT_RATES)):  # for which they were found
        own = PRESETS[name]
        assert all(own[rate] == value for rate, value in rates.items() if rate in own)
        assert own["n_embd"] == REFERENCE_WIDTH and own["weight_decay"] == WEIGHT_DECAY


def test_speeds_lie_on_a_line_between_those_that_were_measured():
    one = {2: 4000.0}
    assert speed(2, one, DOCS) == pytest.approx(4000)
    assert speed(4, one, DOCS) == pytest.approx(4000 * flops(2, DOCS) / flops(4, DOCS))
    two = {2: 4000.0, 6: 800.0}
    assert 800 < speed(4, two, DOCS) < 4000 and speed(8, two, DOCS) < 800 < 4000 < speed(1, two, DOCS)


def test_the_expected_loss_falls_with_tokens_that_are_new():
    bits = [expected_bits(2, tokens, DOCS) for tokens in (1e6, 2e6, 9.7e6)]
    assert bits == sorted(bits, reverse=True)
    small = Text(1e6, 8192)
    assert expected_bits(2, 2e6, DOCS) < expected_bits(2, 2e6, small) < expected_bits(2, 1e6, small)
    assert expected_bits(2, 1e12, small) > expected_bits(2, 20e6, DOCS)


def test_more_time_never_promises_less():
    rates = {depth: 4e10 / flops(depth, DOCS) for depth in (2, 4)}
    promised = [choose(seconds, rates, DOCS).bits_per_byte for seconds in range(30, 3000, 30)]
    assert promised == sorted(promised, reverse=True) and promised[0] > promised[-1] + 0.1


def test_more_time_asks_for_a_deeper_model():
    rates = {depth: 1e11 / flops(depth, DOCS) for depth in (2, 4)}
    chosen = [choose(60 * minutes, rates, DOCS).depth for minutes in (1, 10, 100, 1000, 1e6)]
    assert chosen == sorted(chosen) and chosen[0] < chosen[3]
    assert parameters(chosen[-1], 8192) <= 10 * DOCS.tokens
    assert choose(1e9, {2: 1e5}, Text(100, 256)).depth == 1
    only = choose(600, rates, DOCS, only=3)
    assert only.depth == 3 and only.tokens == pytest.approx(600 * speed(3, rates, DOCS))
    short, learning_pairs = choose(200, rates, DOCS, only=3), 3 * pair_flops(3, DOCS) / 1e11
    assert 1 < learning_pairs < 60
    assert short.tokens == pytest.approx((200 - learning_pairs) * speed(3, rates, DOCS))
    assert math.isfinite(only.bits_per_byte)


def test_a_bpe_of_any_size_is_learned_from_the_text():
    assert [learned_size(name) for name in ("bpe:300", "bpe:", "bpe:-1", "bpe", "300")] == [300, 0, 0, 0, 0]
    tokenizer = load_tokenizer("bpe:300", "the keeper lit the lamp " * 20)
    assert tokenizer.size <= 300 and len(tokenizer.encode("the keeper")) < 8


# How hard a text is before anything is trained

WORDS = ["lamp", "keeper", "harbour", "stone", "evening", "ship", "window", "letter", "the", "and", "was"]


def prose(count, seed=0):
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) + draw.choice("abcdefgh") for _ in range(count))


def test_a_text_that_packs_better_is_easier(tmp_path):
    noise = "".join(random.Random(1).choices(string.printable, k=200_000))
    found = []
    for text in ("all work and no play " * 9000, prose(30_000), noise):
        path = tmp_path / "text.txt"
        path.write_text(text)
        found.append(difficulty(path))
    assert found == sorted(found) and found[0] == EASIEST and found[2] == HARDEST
    assert EASIEST < found[1] < HARDEST
    path.write_text("")
    assert difficulty(path) == 1.0


def test_the_bundled_texts_are_about_as_hard_as_english():
    assert 1 < difficulty(resolve_data("corpus")) < 1.2
    assert difficulty(resolve_data("corpus")) < difficulty(resolve_data("names"))


def test_it_is_the_same_in_every_kind_of_file(tmp_path):
    text = prose(20_000)
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    documents = [text[start : start + 5000] for start in range(0, len(text), 5000)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    shards = ["--tokenizer", "byte", "--shard-tokens", "16384", "--val-shards", "1"]
    prepared = inside("data", "prepare", tmp_path / "a.txt", *shards, "--out", tmp_path / "shards")
    assert prepared.returncode == 0, prepared.stderr
    expected = difficulty(tmp_path / "a.txt")
    for name in ("b.txt.gz", "c.jsonl", "shards"):
        assert difficulty(tmp_path / name) == pytest.approx(expected, rel=0.05), name
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, each in enumerate(documents):
        (folder / f"{number}.txt").write_text(each)
    assert difficulty(folder) == pytest.approx(expected, rel=0.2)  # each file packs alone
