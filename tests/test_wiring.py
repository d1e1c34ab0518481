"""Every setting reaches the part that it is for: whole commands against arithmetic that is written here."""

import hashlib
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from conftest import SMALL, inside, losses, metrics, needs_mpi, train

import distgpt
from distgpt.config import ModelConfig, TrainConfig
from distgpt.data.batches import ArrayTokens, Batches
from distgpt.data.loading import bundled, read_text
from distgpt.data.prepare.vocabulary import learn_bpe
from distgpt.data.shards import ShardWriter
from distgpt.data.tokenizers import bpe, bpe_fast
from distgpt.errors import DataError
from distgpt.files import atomic_file
from distgpt.kernels.cpu import CpuKernels
from distgpt.kernels.reference import ReferenceKernels
from distgpt.measure.peaks import Peaks
from distgpt.measure.profile.operations import ORDER
from distgpt.measure.profile.report import RankProfile, result
from distgpt.model.model import Model
from distgpt.model.optim import AdamW
from distgpt.saved import checkpoint

BATCH, CONTEXT = 8, 16  # of SMALL


def run(out, *args, **settings):
    """A training run in this process, in double precision. `settings` come from a file."""
    file = Path(f"{out}.toml")
    file.write_text("".join(f"{key} = {value!r}\n" for key, value in settings.items()))
    result = inside("train", *SMALL, "--dtype", "float64", "--config", file, "--out", out, *args)
    assert result.returncode == 0, result.stderr
    return Path(out)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Weights to begin with: none is zero, so that all would be seen to decay."""
    whole = run(tmp_path_factory.mktemp("begun") / "run", "--steps", "1")
    model = distgpt.load(whole / "weights.safetensors", dtype="float64")
    random = np.random.default_rng(1)
    for values in model.parameters().values():
        values += random.normal(0, 0.05, values.shape)
    model.save(path := whole / "begun.safetensors")
    return path


# The optimizer


@pytest.mark.parametrize("make", [ReferenceKernels, lambda dtype: CpuKernels(dtype, 1)])
def test_adamw_against_numbers_written_down(make):
    """Two gradients, of a matrix that decays and of a gain that does not: their norm is 5, clipped to 2.

    By hand, with lr 0.1, weight decay 0.5, beta 0.5 and 0.75, eps 0.1, in step 1 (warm-up 2: lr 0.05):
    g = 1.2 and 1.6; m̂ = g, v̂ = g²; p = 2 · (1 - 0.05 · 0.5) - 0.05 · 1.2 / (1.2 + 0.1) = 1.903846153846154
    and p = 2 - 0.05 · 1.6 / (1.6 + 0.1) = 1.952941176470588. In step 2 (lr 0.1) with gradients 0:
    m̂ = 0.25 g / 0.75, v̂ = 0.1875 g² / 0.4375.
    """
    settings = {"lr": 0.1, "weight_decay": 0.5, "clip": 2.0, "beta1": 0.5, "beta2": 0.75, "eps": 0.1}
    model = Model(ModelConfig(vocab_size=3, seq_len=2, n_layer=1, n_head=1, n_embd=2), make("float64"))
    model.train()
    model.weights.flat[:] = 2.0
    model.grads.flat[:] = 0.0
    model.grads["blocks.0.mlp.fc.w"][0, 0], model.grads["blocks.0.norm1.w"][0] = 3.0, 4.0
    optimizer = AdamW(model, TrainConfig(schedule="constant", warmup=2, **settings))
    assert optimizer.step(0, 1.0) == pytest.approx(0.05)
    assert math.sqrt(float(optimizer.norm[0])) == pytest.approx(5.0)
    matrix, gain = model.weights["blocks.0.mlp.fc.w"], model.weights["blocks.0.norm1.w"]
    np.testing.assert_allclose(matrix[0], [1.903846153846154, 1.95], rtol=1e-12)
    np.testing.assert_allclose(gain, [1.952941176470588, 2.0], rtol=1e-12)
    model.grads.flat[:] = 0.0
    assert optimizer.step(1, 1.0) == pytest.approx(0.1)
    # 1.903846… · 0.95 - 0.1 · 0.4 / (1.2 · √(3/7) + 0.1), and the same of 1.6 without decay
    np.testing.assert_allclose(matrix[0], [1.7634859324226, 1.8525], rtol=1e-12)
    np.testing.assert_allclose(gain, [1.9064611336362, 2.0], rtol=1e-12)


SETTINGS = {
    "plain": {},
    "weight decay": {"weight_decay": 0.7},
    "clip": {"clip": 0.05, "eps": 0.01},
    "clip off": {"clip": 0.0, "eps": 0.01},
    "eps": {"eps": 0.3},
    "betas": {"beta1": 0.5, "beta2": 0.6},
    "schedule": {"schedule": "linear", "min_lr": 0.004},
    "micro-batches": {"grad_accum": 4},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_a_run_is_adamw_on_its_batches(settings, begun, tmp_path):
    """Three steps of `distgpt train` against the same in plain NumPy, with the library's gradients."""
    out = run(tmp_path / "run", "--steps", "3", "--init", begun, "--seed", "5", **settings)
    logged = metrics(out)
    model = distgpt.load(begun, dtype="float64")
    text = model.tokenizer.encode(read_text(bundled("data", "story.txt")))
    batches, seen = Batches(ArrayTokens(text), CONTEXT, BATCH, seed=5), np.arange(CONTEXT)
    c = {"lr": 1e-2, "min_lr": 0.0, "warmup": 2, "weight_decay": 0.1, "clip": 1.0, "eps": 1e-8}
    c |= {"beta1": 0.9, "beta2": 0.95, "schedule": "cosine", **settings}
    p = model.parameters()
    m, v = ({name: np.zeros_like(values) for name, values in p.items()} for _ in range(2))
    for step in range(3):
        x, y = (text[(batches.windows(step)[:, None] + places) % len(text)] for places in (seen, seen + 1))
        grads = model.gradients(x, y)
        norm = math.sqrt(sum((g**2).sum() for g in grads.values()))
        lr = rate(c, step, 3)
        found = logged[step + 1]
        assert found["loss"] == pytest.approx(model.loss(x, y), rel=1e-10)
        assert found["grad_norm"] == pytest.approx(norm, rel=1e-10)
        assert found["lr"] == pytest.approx(lr, rel=1e-12)
        for name, values in p.items():
            g = grads[name] * (min(1.0, c["clip"] / norm) if c["clip"] else 1.0)
            m[name] = c["beta1"] * m[name] + (1 - c["beta1"]) * g
            v[name] = c["beta2"] * v[name] + (1 - c["beta2"]) * g**2
            m_hat, v_hat = m[name] / (1 - c["beta1"] ** (step + 1)), v[name] / (1 - c["beta2"] ** (step + 1))
            values *= 1 - lr * c["weight_decay"] * (values.ndim > 1)
            values -= lr * m_hat / (np.sqrt(v_hat) + c["eps"])
    for name, values in distgpt.load(out / "weights.safetensors", dtype="float64").parameters().items():
        np.testing.assert_allclose(values, p[name], rtol=0, atol=1e-9, err_msg=name)


def rate(c, step, steps):
    if step < c["warmup"]:
        return c["lr"] * (step + 1) / c["warmup"]
    done = (step - c["warmup"]) / (steps - c["warmup"])
    left = 1 - done if c["schedule"] == "linear" else (1 + math.cos(math.pi * done)) / 2
    return c["min_lr"] + (c["lr"] - c["min_lr"]) * left


def test_the_seed_decides_the_batches_and_the_first_weights(begun, tmp_path):
    one, same, other = (
        losses(run(tmp_path / f"{i}", "--steps", "1", "--init", begun, "--seed", seed))
        for i, seed in enumerate(("1", "1", "2"))
    )
    assert one == same != other
    one, other = (
        distgpt.load(
            run(tmp_path / seed, "--steps", "1", "--seed", seed, "--lr", "1e-12") / "weights.safetensors"
        )
        for seed in ("3", "4")
    )
    assert not np.allclose(one.parameters()["wte"], other.parameters()["wte"], atol=1e-3)


# What a run writes


def test_the_last_step_is_logged_between_two_that_are_due(tmp_path):
    assert list(metrics(run(tmp_path / "run", "--steps", "5", "--log-every", "2"))) == [2, 4, 5]


def evaluations(out):
    lines = map(json.loads, (Path(out) / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line["val_loss"]) for line in lines if "val_loss" in line]


def test_a_resumed_run_remembers_its_best_loss(tmp_path):
    """A learning rate that ruins the model: the best weights are early ones, before and after resuming."""
    out = tmp_path / "run"
    ruin = ["--val-fraction", "0.2", "--eval-every", "1", "--save-every", "1", "--steps", "6"]
    ruin += ["--lr", "2", "--warmup", "4", "--schedule", "constant", "--clip", "0"]
    run(out, *ruin, keep=9)
    losses = dict(evaluations(out))
    best = min(range(1, 7), key=losses.get)
    assert best < 4 < 6 and losses[5] > losses[best] < losses[6]
    kept = (out / "best.safetensors").read_bytes()
    for step in (5, 6):
        checkpoint = out / "checkpoints" / f"step-{step:08d}"
        checkpoint.rename(tmp_path / checkpoint.name)
    run(out, *ruin, "--resume", "auto")
    assert (out / "best.safetensors").read_bytes() == kept


def test_micro_batches_of_before_are_for_as_many_ranks(tmp_path):
    """A resumed run sums in the same order, unless there are other ranks to sum over."""
    for ranks, expected in ((1, 4), (2, 1)):
        out = run(tmp_path / f"{ranks}", "--steps", "1")
        path = out / "checkpoints" / "step-00000001"
        state = checkpoint.load_state(path)
        assert state["rounds"] == state["world_size"] == 1
        text = json.dumps({**state, "rounds": 4, "world_size": ranks}).encode()
        (path / "state.json").write_bytes(text)
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["state.json"] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
        (path / "manifest.json").write_text(json.dumps(manifest))
        run(out, "--steps", "2", "--resume", "auto")
        assert json.loads((out / "summary.json").read_text())["grad_accum"] == expected


def test_what_a_checkpoint_holds_is_what_its_manifest_says(tmp_path):
    """Also where a whole file was replaced by another that is in itself without damage."""

    def save(step, value):
        tensors = {"x": np.full(3, value)}
        return checkpoint.save_checkpoint(tmp_path, step, {"weights": (tensors, {})}, {}, keep=2), tensors

    (one, wanted), (other, _) = save(1, 1.0), save(2, 2.0)
    destination = {"x": np.zeros(3)}
    checkpoint.load_group(one, "weights", destination)
    np.testing.assert_array_equal(destination["x"], wanted["x"])
    (other / "weights.safetensors").replace(one / "weights.safetensors")
    with pytest.raises(DataError, match="damaged"):
        checkpoint.load_group(one, "weights", destination)


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """And its name, before anybody is told: a shard, and whatever else is written at once."""
    seen, fsync, replace = [], os.fsync, os.replace

    def synced(descriptor):
        seen.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)  # noqa: PTH115
        fsync(descriptor)

    def replaced(source, target):
        assert Path(source).name == seen[-1]
        seen.append(f"named {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", replaced)
    shard = ShardWriter(tmp_path / "train-000000.npy", "<u2")
    shard.write(np.arange(5))
    shard.finish("train")
    with atomic_file(tmp_path / "file") as file:
        file.write(b"text")
    assert seen[1::3] == ["named train-000000.npy", "named file"]
    assert seen[2::3] == [tmp_path.name] * 2 and len(seen) == 6


def test_long_pieces_that_differ_at_their_end_only_are_told_apart(monkeypatch):
    """The encoder remembers pieces of up to 24 bytes: three words of eight, here with few rows to look in."""
    monkeypatch.setattr(bpe_fast, "MEMORY_ROWS", 64)
    monkeypatch.setattr(bpe, "LARGE", 0)  # texts from there on go through it
    tokenizer = learn_bpe(["aaaa bbbb " * 9], size=270, min_frequency=2, separator="none")
    for start in (0, 8, 16):
        ends = [a + b for a in "abcde" for b in "abcde"]
        text = " ".join("a" * start + end + "a" * (16 - start) for end in ends)
        assert tokenizer.decode(tokenizer.encode(text).tolist()) == text, start


# Ranks


@needs_mpi
def test_two_ranks_log_what_one_does(tmp_path):
    args = ["--steps", "3", "--dtype", "float64", "--val-fraction", "0.2", "--eval-every", "1", "--seed", "6"]
    alone, together = train(tmp_path / "alone", *args), train(tmp_path / "together", *args, ranks=2)
    assert evaluations(together) == [(step, pytest.approx(loss)) for step, loss in evaluations(alone)]
    for step, found in metrics(together).items():
        expected = metrics(alone)[step]
        assert {key: found[key] for key in ("loss", "grad_norm", "lr", "tokens")} == pytest.approx(
            {key: expected[key] for key in ("loss", "grad_norm", "lr", "tokens")}, rel=1e-9
        )


# What a model is asked


def told(*args):
    result = inside(*args)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_sampling_options_reach_the_choice_of_tokens(begun):
    def infer(*args):
        return told(
            "infer", "--weights", begun, "--prompt", "the", "--max-new-tokens", "12", "--json", *args
        )["tokens"]

    greedy, hot = infer(), ("--temperature", "50")
    assert infer(*hot, "--top-k", "1") == infer(*hot, "--top-p", "1e-9") == greedy
    assert infer(*hot) != greedy and infer(*hot) == infer(*hot) != infer(*hot, "--seed", "1")


def test_bits_per_byte_are_bits(begun, tmp_path):
    """Of a text whose words the model knows: 0.6931… nats are a bit."""
    text = tmp_path / "text.txt"
    text.write_text("the lamp the lamp\nthe lamp")
    found = told("eval", "--weights", begun, "--val", text, "--json")
    nats = found["val_loss"] * found["val_tokens"]
    predicted = len("the lamp the lamp\nthe lamp") - len("the")
    assert found["bits_per_byte"] == pytest.approx(nats / 0.6931471805599453 / predicted)
    assert found["perplexity"] == pytest.approx(math.exp(found["val_loss"]))


def test_hellaswag_per_token_is_not_the_sum(begun, tmp_path):
    """A model that finds all words alike: per token all endings tie, summed the shortest wins."""
    model = distgpt.load(begun, dtype="float64")
    for values in model.parameters().values():
        values[...] = 0
    model.save(tmp_path / "even.safetensors")
    example = {"ctx": "the", "endings": ["lamp lamp lamp", "lamp", "lamp lamp", "lamp lamp"], "label": 1}
    (tmp_path / "examples").write_text(json.dumps(example))
    how = ["--hellaswag", tmp_path / "examples", "--dtype", "float64", "--json"]
    found = told("eval", "--weights", tmp_path / "even.safetensors", *how)
    assert (found["hellaswag"], found["hellaswag_unnormalised"]) == (0.0, 1.0)


# A profile


def test_a_profile_sums_the_work_of_its_ranks():
    """Two ranks that each do 6 GFLOP in a step of 2 s reach 6 GFLOP/s together, of 2 × 12 that they could."""
    zeros = [0.0] * len(ORDER)
    work = [*zeros[:-1], 6e9]
    peaks = Peaks(12.0, 1.0, "float32")
    ranks = [RankProfile(rank, 1, 3, 2.0, 2.0, peaks, [work, zeros, work, zeros]) for rank in (0, 1)]
    found = result(ranks, {"gpu": False, "tokens_per_step": 10, "ranks": 2})
    assert (found["gflops"], found["of_peak"], found["tokens_per_s"]) == (6.0, 0.25, 5.0)
