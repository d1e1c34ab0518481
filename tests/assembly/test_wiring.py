"""Settings reach their part: commands compared with plain arithmetic."""

import hashlib
import json
import math
import shutil
from pathlib import Path

import distgpt
import numpy as np
import pytest
from distgpt.core.base.files import bundled
from distgpt.core.config import ModelConfig, TrainConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.data.batches import ArrayTokens, Batches
from distgpt.core.data.textfile import read_text
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.optim import AdamW, learning_rate
from distgpt.core.ops.kernels import Kernels
from distgpt.core.saved import checkpoint
from distgpt.measure.profile.operations import ORDER
from distgpt.measure.profile.session import result

from conftest import SMALL, inside, losses, metrics, succeeded, summary, validations

BATCH, CONTEXT = 8, 16  # sizes in SMALL


def run(out, *args, **settings):
    file = Path(f"{out}.toml")
    file.write_text("".join(f"{key} = {value!r}\n" for key, value in settings.items()))
    succeeded("train", *SMALL, "--dtype", "float64", "--config", file, "--out", out, *args)
    return Path(out)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Return first weights without zeros, which decay would not change."""
    whole = run(tmp_path_factory.mktemp("begun") / "run", "--steps", "1")
    model = distgpt.load(whole / "weights.safetensors", dtype="float64")
    random = np.random.default_rng(1)
    for values in model.parameters().values():
        values += random.normal(0, 0.05, values.shape)
    model.save(path := whole / "begun.safetensors")
    return path


@pytest.mark.parametrize("make", [Kernels, lambda dtype: CpuKernels(dtype, 1)])
def test_adamw_matches_hand_computed_numbers(make):
    """Two gradients, of a matrix that decays and of a gain that does not: their norm is 5, clipped to 2.

    By hand, with lr 0.1, weight decay 0.5, beta 0.5 and 0.75, eps 0.1, in step 1 (warm-up 2: lr 0.05):
    g = 1.2 and 1.6; m̂ = g, v̂ = g²; p = 2 · (1 - 0.05 · 0.5) - 0.05 · 1.2 / (1.2 + 0.1) = 1.903846153846154
    and p = 2 - 0.05 · 1.6 / (1.6 + 0.1) = 1.952941176470588. In step 2 (lr 0.1) with gradients 0:
    m̂ = 0.25 g / 0.75, v̂ = 0.1875 g² / 0.4375.
    """
    settings = {"lr": 0.1, "weight_decay": 0.5, "clip": 2.0, "beta1": 0.5, "beta2": 0.75, "eps": 0.1}
    model = Model(Architecture(ModelConfig(vocab_size=3, seq_len=2, n_layer=1, n_head=1, n_embd=2)), make("float64"))
    model.allocate_master_weights()
    model.weights.flat[:] = 2.0
    model.make_gradients()
    model.grads.flat[:] = 0.0
    model.grads["blocks.0.mlp.fc.w"][0, 0], model.grads["blocks.0.norm1.w"][0] = 3.0, 4.0
    optimizer = AdamW(model, TrainConfig(schedule="constant", warmup=2, **settings))
    assert learning_rate(optimizer.config, 0) == pytest.approx(0.05)
    optimizer.step(0, 1.0)
    assert math.sqrt(float(optimizer.norm[0])) == pytest.approx(5.0)
    matrix, gain = model.weights["blocks.0.mlp.fc.w"], model.weights["blocks.0.norm1.w"]
    np.testing.assert_allclose(matrix[0], [1.903846153846154, 1.95], rtol=1e-12)
    np.testing.assert_allclose(gain, [1.952941176470588, 2.0], rtol=1e-12)
    model.grads.flat[:] = 0.0
    assert learning_rate(optimizer.config, 1) == pytest.approx(0.1)
    optimizer.step(1, 1.0)
    # 1.903846… · 0.95 - 0.1 · 0.4 / (1.2 · √(3/7) + 0.1), and the same of 1.6 without decay
    np.testing.assert_allclose(matrix[0], [1.7634859324226, 1.8525], rtol=1e-12)
    np.testing.assert_allclose(gain, [1.9064611336362, 2.0], rtol=1e-12)


SETTINGS = {
    "plain": {}, "weight decay": {"weight_decay": 0.7}, "clip": {"clip": 0.05, "eps": 0.01},
    "clip off": {"clip": 0.0, "eps": 0.01}, "eps": {"eps": 0.3}, "betas": {"beta1": 0.5, "beta2": 0.6},
    "schedule": {"schedule": "linear", "min_lr": 0.004}, "micro-batches": {"grad_accum": 4},
}  # fmt: skip


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_run_matches_adamw_in_numpy(settings, begun, tmp_path):
    out = run(tmp_path / "run", "--steps", "3", "--init", begun, "--seed", "5", **settings)
    logged, model = metrics(out), distgpt.load(begun, dtype="float64")
    text = model.tokenizer.encode(read_text(bundled("data", "story.txt")))
    # Tokens that equal their positions give the places of the sequences in the text.
    batches = Batches(ArrayTokens(np.arange(len(text), dtype=np.uint32)), CONTEXT, BATCH, seed=5)
    seen, ignored = np.zeros((2, BATCH, CONTEXT), np.int32)
    c = {"lr": 1e-2, "min_lr": 0.0, "warmup": 2, "weight_decay": 0.1, "clip": 1.0, "eps": 1e-8}
    c |= {"beta1": 0.9, "beta2": 0.95, "schedule": "cosine", **settings}
    p = model.parameters()
    m, v = ({name: np.zeros_like(values) for name, values in p.items()} for _ in range(2))
    for step in range(3):
        batches.fill(step, slice(0, BATCH), seen, ignored)
        x, y = (text[places % len(text)] for places in (seen, seen + 1))
        grads = model.gradients(x, y)
        norm = math.sqrt(sum((g**2).sum() for g in grads.values()))
        lr = rate(c, step, 3)
        found = logged[step + 1]
        assert found["loss"] == pytest.approx(model.loss(x, y), rel=1e-10)
        assert found["grad_norm"] == pytest.approx(norm, rel=1e-10) and found["lr"] == pytest.approx(lr, rel=1e-12)
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


def test_seed_decides_batches_and_first_weights(begun, tmp_path):
    def one_step(seed, *more):
        return run(tmp_path / f"{len([*tmp_path.iterdir()])}", "--steps", "1", "--seed", seed, *more)

    one, same, other = (losses(one_step(seed, "--init", begun)) for seed in ("1", "1", "2"))
    assert one == same != other
    one, other = (one_step(seed, "--lr", "1e-12") / "weights.safetensors" for seed in ("3", "4"))
    assert not np.allclose(*(distgpt.load(path).parameters()["wte"] for path in (one, other)), atol=1e-3)


def test_resumed_run_remembers_best_loss(tmp_path):
    """A high learning rate makes early weights the best, before and after a resume."""
    out = tmp_path / "run"
    ruin = ["--val-fraction", "0.2", "--eval-every", "1", "--save-every", "1", "--steps", "6"]
    ruin += ["--lr", "2", "--warmup", "4", "--schedule", "constant", "--clip", "0"]
    run(out, *ruin, keep=9)
    losses = validations(out)
    best = min(range(1, 7), key=losses.get)
    assert best < 4 < 6 and losses[5] > losses[best] < losses[6]
    kept = (out / "best.safetensors").read_bytes()
    for step in (5, 6):
        shutil.rmtree(out / "checkpoints" / f"step-{step:08d}")
    run(out, *ruin, "--resume", "auto")
    assert (out / "best.safetensors").read_bytes() == kept


def test_resume_keeps_micro_batches_for_equal_ranks(tmp_path):
    """A resumed run sums in the same order if the number of ranks is equal."""
    for ranks, expected in ((1, 4), (2, 1)):
        out = run(tmp_path / f"{ranks}", "--steps", "1")
        path = out / "checkpoints" / "step-00000001"
        state = checkpoint.load_document(path)
        assert state["rounds"] == state["world_size"] == 1
        text = json.dumps({**state, "rounds": 4, "world_size": ranks}).encode()
        (path / "state.json").write_bytes(text)
        manifest = json.loads((path / "manifest.json").read_text())
        manifest["state.json"] = {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
        (path / "manifest.json").write_text(json.dumps(manifest))
        run(out, "--steps", "2", "--resume", "auto")
        assert summary(out)["grad_accum"] == expected


def test_sampling_options_reach_token_choice(begun):
    def infer(*args):
        words = ("infer", "--weights", begun, "--dtype", "float64", "--prompt", "the", "--json", *args)
        words += ("--max-new-tokens", "12")
        return json.loads(inside(*words).stdout)["tokens"]

    greedy, hot = infer("--temperature", "0"), ("--temperature", "50")
    assert infer(*hot, "--top-k", "1") == infer(*hot, "--top-p", "1e-9") == greedy
    assert infer(*hot) != greedy and infer(*hot) == infer(*hot) != infer(*hot, "--seed", "1")


def test_profile_sums_work_of_ranks():
    """Two ranks that each do 6 GFLOP in a step of 2 s reach 6 GFLOP/s together, of 2 × 12 that they could."""
    zeros = [0.0] * len(ORDER)
    work = [*zeros[:-1], 6e9]
    rank = {"workers": 1, "steps": 3, "step_s": 2.0, "step_s_median": 2.0, "peak_gflops": 12.0}
    ranks = [{**rank, "rank": number, "times": [work, zeros, work]} for number in (0, 1)]
    found = result(ranks, {"gpu": False, "tokens_per_step": 10, "ranks": 2})
    assert (found["gflops"], found["of_peak"], found["tokens_per_s"]) == (6.0, 0.25, 5.0)
