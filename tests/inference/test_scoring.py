"""Losses of spans and validation: against the plain model, and on any number of ranks."""

import json
import math

import distgpt
import numpy as np
import pytest
from distgpt.commands.cli import cli
from distgpt.core.base.errors import UsageError
from distgpt.core.base.files import bundled
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import ModelConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.stages import open_stage
from distgpt.core.data.batches import ArrayTokens, windows_of
from distgpt.core.data.textfile import read_text, resolve_data
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.core.model.model import Architecture, Model
from distgpt.core.saved.modelfile import read_description
from distgpt.core.train import assessment
from distgpt.core.train.assessment import Scorer, Span, Validation
from distgpt.inference.evaluation.evaluate import evaluate
from test_benchmarks import plain
from threadranks import on_all_ranks

CONFIG = ModelConfig(vocab_size=61, seq_len=48, n_layer=2, n_head=2, n_embd=16)
RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(0, 61, 2000).astype(np.uint16)
LENGTHS = [2, 49, 7, 33, 34, 12, 49, 3, 20, 48]
SPANS = [Span(IDS[i * 50 :][:length], 1 + i % (length - 1)) for i, length in enumerate(LENGTHS)]


def model(dtype="float64"):
    made = Model(Architecture(CONFIG), CpuKernels(dtype, 1))
    made.initialise(1)
    return made


def plain_sum(span):
    return plain(distgpt.init(CONFIG, seed=1, dtype="float64"), span)[0]


def test_a_span_costs_what_its_predictions_cost_however_many_go_together(monkeypatch):
    expected = [plain_sum(span) for span in SPANS]
    for together in (assessment.AT_A_TIME, 1):
        monkeypatch.setattr(assessment, "AT_A_TIME", together)
        sums = Scorer(model(), SerialComm()).sums(SPANS)
        np.testing.assert_allclose(sums, expected, rtol=1e-10, err_msg=f"{together} tokens at a time")


def test_any_number_of_ranks_finds_the_same_bits(monkeypatch):
    monkeypatch.setattr("distgpt.core.train.assessment.AT_A_TIME", 100)  # several batches
    many = [Span(IDS[i : i + 2 + i % 47]) for i in range(0, 1900, 7)]
    for dtype in ("float32", "float64"):
        expected = Scorer(model(dtype), SerialComm()).sums(many)
        for sums in on_all_ranks(3, lambda comm, dtype=dtype: Scorer(model(dtype), comm).sums(many)):
            np.testing.assert_array_equal(sums, expected, dtype)


def test_validation_predicts_every_token_once():
    for most, count in ((0, 1999), (100, 100), (1, 1), (5000, 1999)):
        validation = Validation(windows_of(ArrayTokens(IDS), 48, most))
        predicted = np.concatenate([span.ids[1:] for span in validation.spans])
        np.testing.assert_array_equal(predicted, IDS[1 : count + 1])
        loss = validation.measure(Scorer(model(), SerialComm()))
        assert validation.count == count and 3 < loss < 6
        expected = sum(plain_sum(span) for span in validation.spans[:3])
        assert Scorer(model(), SerialComm()).sums(validation.spans[:3]).sum() == pytest.approx(expected)


def test_the_predicted_text_is_as_long_as_it_is_written():
    wide = "a é€😀 b, é€😀 a."
    for kind, text in (("byte", wide), ("char", wide), ("word", "a cat, a dog.")):
        tokenizer = load_tokenizer(kind, text)
        for window in (1, 2, 3, 7):
            validation = Validation(windows_of(ArrayTokens(tokenizer.encode(text)), window))
            size = validation.count / validation.bits_per_byte(math.log(2), tokenizer)
            assert size == pytest.approx(len(text[1:].encode())), (kind, window)
    ids = np.array([60, 97, 98, 60, 99], np.uint16)
    tokenizer = load_tokenizer("byte", "")
    tokenizer.separator = 60  # which is no text
    assert Validation(windows_of(ArrayTokens(ids), 2)).bits_per_byte(math.log(2), tokenizer) == pytest.approx(4 / 3)
    assert Validation(windows_of(ArrayTokens(ids[[0, 3]]), 2)).bits_per_byte(1.0, tokenizer) is None


def test_an_evaluation_counts_bits_by_the_byte(capsys):
    sample = bundled("weights", "sample.safetensors")
    tokenizer = read_description(sample).tokenizer
    ids = tokenizer.encode(read_text(resolve_data("story")))[:301]
    length = len(tokenizer.decode(ids).encode()) - len(tokenizer.decode(ids[:1]).encode())
    found = evaluate(open_stage("serial", 1), sample, "story", val_tokens=300)
    assert found["val_tokens"] == 300 and 0.5 < found["val_loss"] < 5
    assert found["perplexity"] == pytest.approx(2.718281828 ** found["val_loss"])
    assert found["bits_per_byte"] == pytest.approx(found["val_loss"] / 0.693147181 * 300 / length)
    words = f"eval --weights {sample} --val story --val-tokens 300 --threads 1 --json"
    cli.main(words.split(), standalone_mode=False)
    assert json.loads(capsys.readouterr().out) == found
    with pytest.raises(UsageError, match="nothing to evaluate: give --val, or a benchmark"):
        cli.main(["eval", "--weights", "any"], standalone_mode=False)
