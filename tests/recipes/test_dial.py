"""Settings from depth and text, difficulty of text, and depths that fit into a time."""

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
from distgpt.recipes import scaling
from distgpt.recipes.depth import EASIEST, HARDEST, difficulty

from conftest import succeeded

DOCS = scaling.Text(9.7e6, 8192)


def test_scaling_laws():
    assert (scaling.matrices(4), scaling.parameters(4, 8192)) == (12 * 4 * 256**2, 12 * 4 * 256**2 + 8192 * 256)
    sizes = [scaling.vocabulary(size) for size in (70e3, 199e3, 201e3, 1e6, 30e6, 1e12)]
    assert sizes == [256, 256, 512, 2048, 8192, 32768]
    assert scaling.text_to_learn_from(70e3) == scaling.Text(70e3, 256, "byte")
    assert scaling.text_to_learn_from(30e6).tokenizer == "bpe:8192"
    assert scaling.text_to_learn_from(30e6, 4096).vocab_size == 4096
    assert scaling.tokens_to_read(3, DOCS) == 12 * scaling.parameters(3, 8192)
    assert scaling.tokens_to_read(6, DOCS) == 5 * DOCS.tokens
    found = [scaling.batch(tokens) for tokens in (1e3, 2e5, 12e6, 200e6, 1e15)]
    assert found == [512, 1024, 4096, 16384, 1 << 19]
    assert [scaling.context(depth, 1e7) for depth in (1, 3, 4, 6, 7)] == [256, 256, 512, 512, 1024]
    assert scaling.context(7, 100) == 32 and scaling.context(7, 3) == 8


def test_recipe_follows_given_settings():
    run = preset("fast", scaling.recipe(4, 12e6, DOCS))
    assert (run.model.n_embd, run.model.n_head, run.model.seq_len) == (256, 4, 512)
    assert (run.train.lr, run.train.embedding_lr, run.train.head_lr) == (0.03, 0.3, 0.008)
    short = preset("fast", scaling.recipe(4, 1e6, DOCS, given={"batch_tokens": 4096}))
    assert (short.model.init_weights, run.model.init_weights) == ("bigrams", "unit")
    assert (short.train.lr, short.train.embedding_lr, short.train.head_lr) == (0.04, 0.02, 0.0007)
    assert (short.model.windows, run.model.windows) == ([0] * 4, [128, 128, 128, 0])
    assert run.train.steps * run.train.batch_size * 512 == pytest.approx(12e6, rel=0.01)
    assert scaling.recipe(4, 12e6, DOCS, given={"batch_tokens": 16384})["lr"] == 0.05
    assert scaling.recipe(4, 12e6, DOCS, given={"seq_len": 256})["batch_size"] == 16
    assert scaling.recipe(4, 12e6, DOCS, given={"steps": 50})["warmup"] == 2
    assert scaling.recipe(4, 12e6, DOCS, ranks=3)["batch_size"] == 9  # 8 cannot be shared
    for name, rates in (("fast", scaling.FAST_RATES), ("sprint", scaling.SPRINT_RATES)):  # tuned for these rates
        own = PRESETS[name]
        assert all(own[rate] == value for rate, value in rates.items() if rate in own)
        assert own["n_embd"] == scaling.REFERENCE_WIDTH and own["weight_decay"] == scaling.WEIGHT_DECAY


def test_text_that_is_read_many_times_is_regularized():
    few, many = (preset("fast", scaling.recipe(3, passes * 1e6, scaling.Text(1e6, 2048))) for passes in (2, 5))
    assert (few.train.input_noise, few.model.value_embeddings) == (0, True)
    assert (many.train.input_noise, many.model.value_embeddings) == (0.05, False)
    packed = scaling.recipe(3, 5e6, scaling.Text(1e6, 2048), given={"pack": True})
    assert "input_noise" not in packed and not packed["value_embeddings"]
    assert scaling.recipe(3, 1e9, scaling.Text(1e6, 2048))["input_noise"] == scaling.MOST_NOISE


def test_speeds_are_interpolated():
    one = {2: 4000.0}
    assert scaling.speed(2, one, DOCS) == pytest.approx(4000)
    assert scaling.speed(4, one, DOCS) == pytest.approx(4000 * scaling.flops(2, DOCS) / scaling.flops(4, DOCS))
    two = {2: 4000.0, 6: 800.0}
    assert 800 < scaling.speed(4, two, DOCS) < 4000 and scaling.speed(8, two, DOCS) < 800 < 4000 < scaling.speed(
        1, two, DOCS
    )


def test_expected_loss_falls_with_new_tokens():
    bits = [scaling.expected_bits(2, tokens, DOCS) for tokens in (1e6, 2e6, 9.7e6)]
    assert bits == sorted(bits, reverse=True)
    small = scaling.Text(1e6, 8192)
    assert (
        scaling.expected_bits(2, 2e6, DOCS)
        < scaling.expected_bits(2, 2e6, small)
        < scaling.expected_bits(2, 1e6, small)
    )
    assert scaling.expected_bits(2, 1e12, small) > scaling.expected_bits(2, 20e6, DOCS)


def test_more_time_never_promises_less():
    rates = {depth: 4e10 / scaling.flops(depth, DOCS) for depth in (2, 4)}
    promised = [scaling.choose(seconds, rates, DOCS).bits_per_byte for seconds in range(30, 3000, 30)]
    assert promised == sorted(promised, reverse=True) and promised[0] > promised[-1] + 0.1


def test_more_time_chooses_deeper_models():
    rates = {depth: 1e11 / scaling.flops(depth, DOCS) for depth in (2, 4)}
    chosen = [scaling.choose(60 * minutes, rates, DOCS).depth for minutes in (1, 10, 100, 1000, 1e6)]
    assert chosen == sorted(chosen) and chosen[0] < chosen[3]
    assert scaling.parameters(chosen[-1], 8192) <= scaling.PARAMETERS_PER_TOKEN * DOCS.tokens
    assert scaling.choose(1e9, {2: 1e5}, scaling.Text(100, 256)).depth == 1
    only = scaling.choose(600, rates, DOCS, only=3)
    assert only.depth == 3 and only.tokens == pytest.approx(600 * scaling.speed(3, rates, DOCS))
    short, learning_pairs = scaling.choose(200, rates, DOCS, only=3), 3 * scaling.pair_flops(3, DOCS) / 1e11
    assert 1 < learning_pairs < 60
    assert short.tokens == pytest.approx((200 - learning_pairs) * scaling.speed(3, rates, DOCS))
    assert math.isfinite(only.bits_per_byte)


def test_bpe_of_any_size_is_learned():
    assert [learned_size(name) for name in ("bpe:300", "bpe:", "bpe:-1", "bpe", "300")] == [300, 0, 0, 0, 0]
    tokenizer = load_tokenizer("bpe:300", "the keeper lit the lamp " * 20)
    assert tokenizer.size <= 300 and len(tokenizer.encode("the keeper")) < 8


WORDS = ["lamp", "keeper", "harbour", "stone", "evening", "ship", "window", "letter", "the", "and", "was"]


def prose(count, seed=0):
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) + draw.choice("abcdefgh") for _ in range(count))


def test_compressible_text_is_easier(tmp_path):
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


def test_bundled_data_is_as_difficult_as_english():
    assert 1 < difficulty(resolve_data("corpus")) < 1.2
    assert difficulty(resolve_data("corpus")) < difficulty(resolve_data("names"))


def test_difficulty_is_equal_in_all_formats(tmp_path):
    text = prose(20_000)
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    documents = [text[start : start + 5000] for start in range(0, len(text), 5000)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    shards = ["--tokenizer", "byte", "--shard-tokens", "16384", "--val-shards", "1"]
    succeeded("data", "prepare", tmp_path / "a.txt", *shards, "--out", tmp_path / "shards")
    expected = difficulty(tmp_path / "a.txt")
    for name in ("b.txt.gz", "c.jsonl", "shards"):
        assert difficulty(tmp_path / name) == pytest.approx(expected, rel=0.05), name
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, each in enumerate(documents):
        (folder / f"{number}.txt").write_text(each)
    assert difficulty(folder) == pytest.approx(expected, rel=0.2)  # files are compressed separately
