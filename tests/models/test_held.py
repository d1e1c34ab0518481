"""Quantized bases of adapters: exact where a file's format allows it, and the same losses as without."""

from dataclasses import replace

import numpy as np
import pytest
from complaints import done
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import ModelConfig, RunConfig, TrainConfig
from distgpt.core.cpu.kernels import Bfloat16Kernels, CpuKernels
from distgpt.core.model.memory import EMBEDDING, MATRIX, Spec
from distgpt.core.ops.api import IGNORE_INDEX, Affine, Head
from distgpt.core.saved.modelfile import read_description
from distgpt.core.saved.tensors import read_header
from distgpt.core.train.assessment import Scorer
from distgpt.core.train.memory import fitting, needed
from distgpt.core.train.parallel_strategy import Strategy
from distgpt.inference.quantized.integers import PLACES, restored
from distgpt.inference.quantized.rounding import rounded
from distgpt.models.adapters import ADAPTERS, AdaptedModel
from distgpt.models.formats.gguf.transfer import export_gguf, import_gguf
from distgpt.models.quantized import held as held_module
from distgpt.models.quantized.bits import bits_of
from distgpt.models.quantized.held import OURS, held_matrices, with_held
from distgpt.models.quantized.rounded import quantize
from foreignmodels import random_model, shape, tensors_in
from gguffiles import LLAMA

from conftest import inside, losses, refused

ODD = shape(300, 16, 1, 3, 42, mlp_width=37)  # rows of 42 and 37: not whole blocks
WORDS = ["--data", "story", "--seq-len", "16", "--batch-size", "8", "--lr", "2e-2", "--steps", "12"]
WORDS += ["--lora-rank", "2", "--threads", "1", "--progress", "plain"]


def expanded(path, base, kernels=None, **more):
    """Return a base's matrices as they are added to, by name."""
    kernels, run = kernels or CpuKernels("float32", 2), read_description(path).run
    run = replace(run, train=replace(run.train, init=str(path), lora_rank=2, lora_base=base, **more))
    model, found = AdaptedModel(run, kernels), {}
    ADAPTERS.load_frozen(SerialComm(), model, run.train)
    for name, held in model.held.items():
        found[name] = kernels.zeros(len(held), held.columns)
        kernels.add_low_rank(found[name], held, None, None, 0.0)
    specs = [spec for spec in model.architecture.layout.specs if bits_of(spec, base) and ".lora_" not in spec.name]
    assert found.keys() == {spec.name for spec in specs} and "wte" in found
    return found


@pytest.mark.parametrize(("base", "bits"), [("int8", 8), ("int4", 4)])
def test_base_is_rounded_once_or_not_at_all(base, bits, tmp_path):
    plain, own = tmp_path / "w.safetensors", tmp_path / "q.safetensors"
    arrays = random_model(plain, ODD)
    quantize(plain, own, base)
    for path, matrices in ((plain, "all"), (own, "q,up")):
        for name, found in expanded(path, base, lora_matrices=matrices).items():
            own_bits = 8 if name in ("wte", "head.w") else bits
            np.testing.assert_array_equal(found, restored(rounded(arrays[name], own_bits, 1)), err_msg=name)
    random_model(plain, LLAMA)
    for dtype in ("q8_0", "q4_0"):
        file, back = tmp_path / f"{dtype}.gguf", tmp_path / f"{dtype}.safetensors"
        export_gguf(plain, file, dtype)
        import_gguf(file, back, None)
        exact, types = tensors_in(back), {entry.dtype for entry in read_header(back).tensors.values()}
        assert types == {"F32", "Q8_0", dtype.upper()}
        assert back.stat().st_size < 1.5 * file.stat().st_size
        if dtype == "q4_0" or bits == 8:
            for name, found in expanded(back, base).items():
                np.testing.assert_array_equal(found, exact[name], err_msg=name)


@pytest.mark.parametrize("kernels", [CpuKernels("float32", 2), CpuKernels("float64", 1), Bfloat16Kernels(2)])
@pytest.mark.parametrize(("base", "columns"), [("int8", 70), ("int4", 70), ("int4", 64)])
def test_products_are_added_to_expanded_rows(kernels, base, columns):
    draw = np.random.default_rng(2)
    w, b, a = (draw.standard_normal(size) for size in ((90, columns), (90, 3), (3, columns)))
    x = rounded(w.astype(np.float32), 8 if base == "int8" else 4, 1)
    held = held_matrices([Spec("m", w.shape, MATRIX)], base, kernels)["m"]
    q, levels = (x.q, None) if base == "int8" else (PLACES[x.q.view(np.uint8)], OURS)
    held.set(q, x.scales, levels)
    low = [kernels.zeros(*each.shape) for each in (b, a)]
    for array, each in zip(low, (b, a), strict=True):
        kernels.put(array, each)
    y = kernels.zeros(60, columns)
    kernels.add_low_rank(y, held[slice(20, 80)], low[0][20:80], low[1], 0.5)
    wanted = restored(x)[20:80] + 0.5 * np.float64(kernels.to_host(low[0]))[20:80] @ kernels.to_host(low[1])
    tolerance = 2**-7 if isinstance(kernels, Bfloat16Kernels) else 1e-5
    assert np.abs(kernels.to_host(y) - wanted).max() < tolerance * np.abs(wanted).max()


@pytest.mark.parametrize("kernels", [CpuKernels("float32", 2), CpuKernels("float64", 1), Bfloat16Kernels(2)])
def test_held_embeddings_compute_as_expanded_ones(kernels, monkeypatch):
    monkeypatch.setattr(held_module, "EXPANDED", 42 * kernels.dtype.itemsize * 100)  # 3 parts
    draw = np.random.default_rng(3)
    w = draw.standard_normal((300, 42)).astype(np.float32)
    kernels = with_held(kernels)
    held, plain = held_matrices([Spec("m", w.shape, EMBEDDING)], "int4", kernels)["m"], kernels.zeros(*w.shape)
    x = rounded(w, 8, 1)
    held.set(x.q, x.scales, None)
    kernels.put(plain, restored(x))
    assert held.size == plain.size
    tokens, targets = (kernels.integers(draw.integers(0, 260, 60)) for _ in range(2))
    targets[7:20] = IGNORE_INDEX
    results = []
    for each in (held, plain):
        rows, dx, losses = kernels.zeros(60, 42), kernels.zeros(60, 42), kernels.accum_zeros(60)
        logits = kernels.zeros(1, 300)
        kernels.embed(rows, tokens, each, None, 60, None)
        head = Head(each, kernels.zeros(20, 300), 260)
        kernels.linear_cross_entropy(losses, dx, None, rows, head, targets, 1.0, False)
        kernels.linear(logits, rows[:1], Affine(each, None))
        results.append([kernels.to_host(y) for y in (rows, dx, losses, logits)])
    np.testing.assert_array_equal(results[0][0], results[1][0])
    tolerance = 2**-7 if isinstance(kernels, Bfloat16Kernels) else 1e-5
    for own, wanted in zip(*results, strict=True):
        assert np.abs(own - wanted).max() < tolerance * np.abs(wanted).max()


def test_small_bases_take_small_batches_and_share_logits():
    config = ModelConfig(**{**LLAMA, "seq_len": 256, "vocab_size": 4096})
    train = TrainConfig(lora_rank=2, batch_size=8, init="base.safetensors")
    found = {}
    for base in ("none", "int8", "int4"):
        run, kernels = RunConfig(config, replace(train, lora_base=base)), CpuKernels("float32", 1)
        settled, _ = fitting(run, kernels, Strategy(run.train, 1), 1 << 40, "here", True)
        found[base] = needed(replace(run, train=settled), kernels, Strategy(run.train, 1), True)
        assert (settled.grad_accum, settled.recompute) == (1 if base == "none" else 4, "mlp")
    sizes = [[need.weights, need.activations, need.evaluation] for need in found.values()]
    assert sizes[0] > sizes[1] > sizes[2] and found["int8"].activations < 0.3 * found["none"].activations
    assert found["int8"].evaluation < 0.2 * found["none"].evaluation
    model = AdaptedModel(replace(run, train=replace(run.train, lora_base="int8")), CpuKernels())
    scorer = Scorer(model, SerialComm())
    scorer.reserve(32, 1 << 31)
    assert scorer.work.shape == (16, 32)


@pytest.mark.ci
def test_training_above_a_base_in_q8_0_has_the_same_losses(tmp_path):
    random_model(tmp_path / "w.safetensors", LLAMA)
    export_gguf(tmp_path / "w.safetensors", tmp_path / "w.gguf", "q8_0")
    base = tmp_path / "base.safetensors"
    import_gguf(tmp_path / "w.gguf", base, "byte")
    for name in ("none", "int8", "int4"):
        done("train", "--init", base, *WORDS, "--base", name, "--out", tmp_path / name)
    np.testing.assert_allclose(losses(tmp_path / "int8"), losses(tmp_path / "none"), rtol=1e-5)
    difference = np.abs(np.subtract(losses(tmp_path / "int4"), losses(tmp_path / "none")))
    assert 1e-4 < difference.max() < 0.5 and losses(tmp_path / "int4")[-1] < losses(tmp_path / "int4")[0] - 0.1
    done("train", "--resume", tmp_path / "int4", "--steps", "14", "--threads", "1")
    done("infer", "--weights", tmp_path / "int4", "--prompt", "the", "--max-new-tokens", "2")
    refused(inside("train", "--init", base, *WORDS[:-6], "--base", "int8", "--out", tmp_path / "new"), 2, "--lora-rank")
