"""The model: gradients against central differences, and fused against reference kernels."""

import tracemalloc
from dataclasses import replace

import distgpt
import numpy as np
import pytest
from adapted import adapted, gradients, merged
from adapted import expected as expected_of
from distgpt.core.base.errors import UsageError
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import ModelConfig, TrainConfig
from distgpt.core.config.presets import preset
from distgpt.core.cpu.fused import flat
from distgpt.core.cpu.kernels import Bfloat16Kernels, CpuKernels
from distgpt.core.data.batches import ArrayTokens, Batches
from distgpt.core.model.memory import ALIGNED, MATRIX, Layout
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.muon import Muon, borders, muon_scalars
from distgpt.core.model.optim import learning_rate, step_scalars
from distgpt.core.model.passes import FEW_ROWS, LARGE_LAYER, Pass
from distgpt.core.ops.kernels import Kernels
from steps import build_step, state_for
from threadranks import on_all_ranks

from conftest import SMALL, in_one_job, losses, slow_ranks, train
from models import BASE, VARIANTS, batch, build, check_by_differences, plain_logits, plain_trace


def loss(work, tokens, targets):
    total = work.k.accum_zeros(1)
    work.loss(total, tokens, targets)
    return float(total[0])


@pytest.mark.ci
def test_gradients_match_central_differences():
    examples = batch(BASE, 3, 7)
    for kind, config in VARIANTS.items():
        model = build(config, Kernels("float64"))
        Pass(model, 3, 7, training=True).loss_and_gradients(*examples, 1.0, accumulate=False)
        check_by_differences(model, model.grads, *examples, kind)
        if config.padded_vocab > config.vocab_size:
            assert not model.grads["wte"][config.vocab_size :].any(), kind


@pytest.mark.ci
@pytest.mark.parametrize("dtype, threads", [("float64", 1), ("float64", 3), ("float32", 2)])
def test_fused_gradients_match_reference(dtype, threads):
    tolerance = {"float64": 1e-12, "float32": 2e-4}[dtype]
    fused = CpuKernels(dtype, threads)
    for kind in VARIANTS if dtype == "float64" else ("gpt2", "modern"):
        config, results = VARIANTS[kind], []
        for kernels in (Kernels("float64"), fused):
            model = build(config, kernels)
            work = Pass(model, 3, 7, training=True)
            tokens, targets = batch(config, 3, 7)
            work.loss_and_gradients(tokens, targets, 0.7, accumulate=False)
            work.loss_and_gradients(tokens[::-1].copy(), targets, 0.3, accumulate=True)
            results.append((model.grads.flags[:1], model.grads.flat))
        for expected, got in zip(*results, strict=True):
            atol = tolerance * np.abs(expected).max()
            np.testing.assert_allclose(got, expected, rtol=0, atol=atol, err_msg=kind)


def test_workers_do_not_zero_shared_gradients(monkeypatch):
    kernels = CpuKernels("float32", 2)
    together, zeroed, run = [], [], kernels.run_together
    monkeypatch.setattr(kernels, "zero", lambda x: zeroed.append(bool(together)))

    def run_together(work):
        together.append(work)
        run(work)
        together.clear()

    monkeypatch.setattr(kernels, "run_together", run_together)
    config = VARIANTS["value embeddings"]
    work = Pass(build(config, kernels), 3, 7, training=True)
    work.loss_and_gradients(*batch(config, 3, 7), 1.0, accumulate=False)
    assert zeroed == [False] * 3  # two value embeddings and the embedding


def test_loss_matches_the_formulas():
    for kind, config in VARIANTS.items():
        model = build(config, Kernels("float64"))
        for seq_len in (9, 4):
            tokens, targets = batch(config, 3, seq_len)
            sequences = tokens.reshape(3, seq_len)
            logits = np.concatenate([plain_logits(config, model.params, row) for row in sequences])
            losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(targets)), targets]
            work = Pass(model, 3, seq_len, training=False)
            assert loss(work, tokens, targets) == pytest.approx(losses.mean(), rel=1e-12), kind


@pytest.mark.parametrize("cut", [[range(1), range(1, 3)], [range(2), range(2, 3)]])
@pytest.mark.parametrize("fuses", [False, True])
def test_layer_groups_keep_gradients_and_are_prepared(cut, fuses):
    config, found = replace(VARIANTS["value embeddings"], n_layer=3), []
    for groups in ([range(3)], cut):
        kernels = Kernels("float64") if fuses else CpuKernels("float32", 2)
        kernels.capabilities = replace(kernels.capabilities, fuses_residual=fuses)
        model, prepared = build(config, kernels), []
        model.groups, model.prepare = groups, prepared.append
        Pass(model, 4, 7, training=True).loss_and_gradients(*batch(config, 4, 7), 1.0, accumulate=False)
        assert prepared == [*groups, *reversed(groups)]
        found.append(model.grads.with_flags.copy())
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
@pytest.mark.parametrize("some, kernels", [("matrices", Kernels("float64")), ("vectors", CpuKernels("float32", 1))])
def test_model_trains_only_its_layout(some, kernels, norm):
    config = replace(VARIANTS["gpt2"], n_layer=3, norm=norm, bias=norm == "layernorm", qkv_bias=True, embed_norm=True)
    whole = build(config, kernels)
    layout = Layout(
        spec for spec in whole.layout.specs
        if (spec.name.startswith(("blocks.2.mlp", "blocks.0.attn")) if some == "matrices" else not spec.is_matrix)
    )  # fmt: skip
    given = {name: x * (name not in layout.offsets) for name, x in whole.params.items()}
    part = Model(Architecture(config), kernels, layout, given)
    for name, values in part.params.items():
        values[...] = whole.params[name]
    ends = []
    for model in (whole, part):
        model.make_gradients()
        model.grads.flat[...] = np.nan
        work = Pass(model, 4, 7, training=True)
        for accumulate in (False, True):
            work.loss_and_gradients(*batch(config, 4, 7), 1.0, accumulate, ends.append)
    assert 0 < len(part.grads) < len(whole.grads) and set(part.grads) == set(layout.offsets)
    for name, values in part.grads.items():
        np.testing.assert_array_equal(values, whole.grads[name])
    of_layers = [[name for name in layout.offsets if f"blocks.{i}." in name] for i in (2, 1, 0)]
    assert ends[8:] == 2 * [*map(layout.end_of, of_layers), layout.size]


def test_recompute_keeps_gradients():
    kernels = CpuKernels("float32", 2)
    for kind in ("gpt2", "modern", "microgpt", "scaled queries"):
        model, results = build(VARIANTS[kind], kernels), {}
        for how in ("mlp", "none", "block"):
            work = Pass(model, 4, 7, training=True, recompute=how)
            for _ in range(2):
                work.loss_and_gradients(*batch(model.config, 4, 7), 1.0, accumulate=False)
            results[how] = model.grads.with_flags.copy()
            np.testing.assert_allclose(results[how], results["mlp"], 1e-4, 1e-6, err_msg=f"{kind} {how}")


def test_ready_gradients_are_final():
    model = build(VARIANTS["modern"], CpuKernels("float32", 1))
    work, seen = Pass(model, 2, 7, training=True), []
    noted = lambda n: seen.append((n, model.grads.flat[:n].copy()))  # noqa: E731
    work.loss_and_gradients(*batch(model.config, 2, 7), 1.0, False, noted)
    ends = [n for n, _ in seen]
    assert ends == sorted(ends) and ends[-1] == model.layout.size and len(ends) == 3
    for n, then in seen:
        np.testing.assert_array_equal(then, model.grads.flat[:n])


def test_training_step_allocates_nothing_large():
    model = build(replace(BASE, n_embd=48, seq_len=64), CpuKernels("float32", 1))
    work = Pass(model, 4, 64, training=True)
    tokens, targets = batch(model.config, 4, 64)
    work.loss_and_gradients(tokens, targets, 1.0, accumulate=False)
    tracemalloc.start()
    work.loss_and_gradients(tokens, targets, 1.0, accumulate=False)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 64 * 48 * 4  # less than one activation


def test_initial_values_depend_on_seed_and_name():
    one, deeper = (Model(Architecture(replace(BASE, n_layer=n)), Kernels()) for n in (2, 3))
    for model in (one, deeper):
        model.initialise(5)
    np.testing.assert_array_equal(one.params["wte"], deeper.params["wte"])
    assert one.params["blocks.0.attn.qkv.w"].std() == pytest.approx(0.2, rel=0.1)
    assert one.params["blocks.0.attn.proj.w"].std() == pytest.approx(0.1, rel=0.1)
    assert not one.params["wte"][13:].any() and one.params["wte"][:13].any()
    one.initialise(6)
    assert (one.params["wte"] != deeper.params["wte"]).any()


@pytest.mark.parametrize("name, size", [
    ("gpt2", 124_475_904), ("microgpt", 4_192), ("smollm2-135m", 134_515_008), ("smollm2-360m", 361_821_120),
    ("qwen3-0.6b", 596_049_920), ("llama3.2-1b", 1_235_814_400),
])  # fmt: skip
def test_presets_have_published_sizes(name, size):
    assert Architecture(preset(name).model).layout.elements == size


def test_model_requires_vocabulary():
    with pytest.raises(UsageError, match="vocab"):
        Model(Architecture(ModelConfig()), Kernels())


def test_few_rows_of_wide_layers_use_one_slice():
    """Without gradients, the matmuls of one slice split columns."""
    wide = replace(BASE, n_layer=1, n_head=4, n_embd=384)
    assert 12 * wide.n_embd**2 * 4 > LARGE_LAYER
    model = build(wide, CpuKernels("float32", 2))
    many = 2 * FEW_ROWS.stop // 7 + 2
    for n_seq, seq_len, training, slices in ((4, 7, False, 1), (4, 7, True, 2), (many, 7, False, 2), (4, 1, False, 2)):
        work = Pass(model, n_seq, seq_len, training=training)
        assert len(work.slices) == slices
        tokens, targets = batch(wide, n_seq, seq_len)
        alone = Pass(model, n_seq, seq_len, training=False, workers=1)
        assert loss(work, tokens, targets) == pytest.approx(loss(alone, tokens, targets), rel=1e-6)
    assert len(Pass(build(BASE, CpuKernels("float32", 2)), 4, 7, training=False).slices) == 2


@pytest.mark.parametrize("n_seq, slices", [(4, 2), (6, 2), (5, 1), (1, 1), (12, 6), (20, 10), (34, 2)])
def test_slices_keep_gradients_identical(n_seq, slices, monkeypatch):
    found = []
    for rows in (1 << 30, 14):
        monkeypatch.setattr(CpuKernels, "slice_rows", rows)
        model = build(BASE, CpuKernels("float32", 2, "own"))
        work = Pass(model, n_seq, 7, training=True)
        work.loss_and_gradients(*batch(BASE, n_seq, 7), 1.0, False)
        found.append([model.grads[name].copy() for name in model.grads])
    assert len(work.slices) == slices
    for one, several in zip(*found, strict=True):
        assert np.array_equal(one, several)


TOKENS = np.random.default_rng(0).integers(0, 13, (4, 7))


@pytest.fixture(params=["gpt2", "modern", "microgpt", "grouped queries", "windows"])
def model(request):
    return distgpt.init(VARIANTS[request.param], seed=3, dtype="float64")


def test_trace_follows_the_formulas(model):
    trace, c = model.trace(TOKENS), model.config
    assert {x.shape for x in trace.hidden} == {(4, 7, c.n_embd)}
    for i, tokens in enumerate(TOKENS):
        logits, hidden, weights = plain_trace(c, model.parameters(), tokens)
        np.testing.assert_allclose(trace.logits[i], logits, atol=1e-12)
        np.testing.assert_allclose([x[i] for x in trace.hidden], hidden, atol=1e-10)
        found = [x[i] for x in trace.attention]
        np.testing.assert_allclose(found, np.reshape(weights, (c.n_layer, c.n_head, 7, 7)), atol=1e-12)
    np.testing.assert_allclose(trace.logits, model.logits(TOKENS), atol=1e-12)


def test_single_sequence_needs_no_batch_axis(model):
    one, many = model.trace(TOKENS[0]), model.trace(TOKENS)
    np.testing.assert_allclose(one.logits, many.logits[0], atol=1e-12)
    np.testing.assert_allclose(one.attention[1], many.attention[1][0], atol=1e-12)
    np.testing.assert_allclose(model.logits(TOKENS[0]), one.logits, atol=1e-12)
    assert model.logits(TOKENS[0].tolist()).shape == (7, 13)
    assert model.loss(TOKENS[0], TOKENS[1]) == model.loss(TOKENS[:1], TOKENS[1:2])
    gradients = (model.gradients(*pair)["wte"] for pair in (TOKENS[:2], (TOKENS[:1], TOKENS[1:2])))
    np.testing.assert_array_equal(*gradients)


def test_model_repr():
    model = distgpt.init(VARIANTS["gpt2"], dtype="float64")
    for part in ("2 layers, 3 heads, width 24, context 9", "float64"):
        assert part in repr(model)
    assert "(4, 3, 7, 7)" in repr(model.trace(TOKENS))


def close(found, wanted, tolerance):
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        distance = np.linalg.norm(found[name] - gradient) / np.linalg.norm(gradient)
        assert distance < tolerance, (name, distance)


@pytest.mark.parametrize(
    "kernels",
    [Kernels("float64"), pytest.param(CpuKernels("float64", 2), marks=pytest.mark.ci)],
    ids=["plain", "fused"],
)
def test_gradients_follow_the_chain_rule(kernels):
    for kind, config in VARIANTS.items():
        tokens, targets = batch(config, 3, 7)
        for matrices in ("all", "q,v,up") if kind in ("gpt2", "modern", "grouped queries") else ("all",):
            model = adapted(config, kernels, matrices)
            wanted, loss = expected_of(model, Kernels("float64"), tokens, targets)
            for recompute in ("none", "mlp", "block"):
                found, same = gradients(model, tokens, targets, recompute)
                close(found, wanted, 1e-11)
                assert same == pytest.approx(loss, rel=1e-12), kind


@pytest.mark.parametrize("kernels, limit", [(CpuKernels("float32", 2), 1e-4), (Bfloat16Kernels(2), 0.12)])
def test_gradients_in_training_types(kernels, limit):
    for kind in ("gpt2", "modern", "a head size of its own"):
        tokens, targets = batch(VARIANTS[kind], 4, 9)
        model = adapted(VARIANTS[kind], kernels)
        wanted, loss = expected_of(model, Kernels("float64"), tokens, targets, n_seq=4)
        found, same = gradients(model, tokens, targets, n_seq=4)
        close(found, wanted, limit)
        assert same == pytest.approx(loss, rel=limit / 10), kind


def test_fresh_adapters_keep_the_model():
    kernels = Bfloat16Kernels(1)
    model = adapted(BASE, kernels)
    model.initialise(7)
    assert not any(np.any(x) for name, x in model.weights.items() if name.endswith("lora_b"))
    assert all(np.any(x) for name, x in model.weights.items() if name.endswith("lora_a"))
    tokens, _ = batch(BASE, 1, 9)
    work, scores = Pass(model, 1, 9, training=False), kernels.zeros(9, BASE.padded_vocab)
    work.logits(scores, work.forward(tokens))
    wanted = plain_logits(BASE, merged(model), tokens)
    got = kernels.to_host(scores)[:, : BASE.vocab_size]
    np.testing.assert_allclose(got, wanted, atol=0.05 * np.abs(wanted).max())
    model.make_gradients()
    assert set(model.grads) == set(model.weights) == {spec.name for spec in model.layout.specs}
    assert model.layout.elements < model.frozen.layout.elements / 3


def test_low_rank_addition_is_unbiased():
    """Rounding to the nearest bfloat16 would drop this addition."""
    kernels, rng = Bfloat16Kernels(2), np.random.default_rng(0)
    w, b, a, y = (kernels.zeros(*shape) for shape in ((64, 512), (64, 2), (2, 512), (64, 512)))
    kernels.put(w, rng.uniform(1, 2, w.shape))
    kernels.put(b, rng.standard_normal(b.shape))
    kernels.put(a, rng.standard_normal(a.shape))
    kernels.add_low_rank(y, w, b, a, 1e-4)
    exact = kernels.to_host(b) @ kernels.to_host(a)
    added = (kernels.to_host(y) - kernels.to_host(w)) * 1e4
    assert (added * exact).sum() == pytest.approx((exact**2).sum(), rel=0.1)


def test_low_rank_addition_is_identical_for_any_threads(monkeypatch):
    rng, found = np.random.default_rng(0), []
    host = [rng.standard_normal(shape) for shape in ((70, 40), (70, 3), (3, 40))]
    for threads, rows in ((1, 1000), (1, 8), (2, 8)):
        monkeypatch.setattr(flat, "SUMS_BYTES", 40 * 4 * rows)
        monkeypatch.setattr(flat, "LEAST_ROWS", 1)
        kernels = Bfloat16Kernels(threads)
        w, b, a = (kernels.zeros(*each.shape) for each in host)
        for array, each in zip((w, b, a), host, strict=True):
            kernels.put(array, each)
        y = np.zeros_like(w)
        kernels.add_low_rank(y, w, b, a, 0.5)
        found.append(y)
    assert found[0].any() and all(np.array_equal(found[0], each) for each in found)


MODEL = ModelConfig(64, seq_len=8, n_layer=3, n_head=4, n_kv_head=2, n_embd=32, value_embeddings=True)
MODEL = replace(MODEL, mlp="swiglu", tied=False)
CONFIG = TrainConfig(batch_size=24, seed=3, recompute="mlp", matmul="own", clip=0.5)
CONFIG = replace(CONFIG, optimizer="muon", lr=0.02, embedding_lr=0.1)


def trained(comm, kernels=None, **how):
    config = replace(CONFIG, **how)
    model = Model(Architecture(MODEL), kernels or CpuKernels("float32"))
    model.allocate_master_weights(comm.size)
    model.initialise(1)
    tokens = ArrayTokens(np.arange(700, dtype=np.uint16) * 7 % MODEL.vocab_size)
    batches = Batches(tokens, MODEL.seq_len, config.batch_size, config.seed)
    state = state_for(model, config, comm)
    work, optimizer = build_step(state, comm, config), state.optimizer
    read = [work.launch(step, batches).wait()[:2] for step in range(5)]
    return model.weights, optimizer, np.array(read)


def test_muon_updates_only_matrices_of_layers():
    _, optimizer, _ = trained(SerialComm(), Kernels())
    for spec in optimizer.model.layout.specs:
        is_muons = spec.name.startswith("blocks.") and spec.name.endswith((".qkv.w", ".proj.w", ".fc.w"))
        assert (spec.group == MATRIX) is is_muons, spec.name
        second = (sum(max(shape) for shape in parts_of(spec)),) if is_muons else spec.shape
        assert (optimizer.m[spec.name].shape, optimizer.v[spec.name].shape) == (spec.shape, second), spec.name


def parts_of(spec):
    """Return the shapes of the matrices; q, k and v are separate, and swiglu's two."""
    rows, columns = spec.shape
    heights = {"qkv": (32, 16, 16), "fc": (rows // 2, rows // 2)}.get(spec.name.split(".")[-2], (rows,))
    return [(height, columns) for height in heights]


@pytest.fixture
def updated():
    def moved(config, change=lambda gradients: None):
        model = Model(Architecture(config), Kernels())
        model.allocate_master_weights()
        model.initialise(1)
        optimizer = Muon(model, replace(CONFIG, weight_decay=0.0, warmup=0, clip=0.0))
        model.grads.flat[:] = np.random.default_rng(0).standard_normal(model.layout.size)
        change(model.grads)
        before = {name: array.copy() for name, array in model.weights.items()}
        optimizer.step(0, 1.0)
        return {spec: (before[spec.name] - model.weights[spec.name]) / CONFIG.lr for spec in model.layout.specs}

    return moved


def test_heads_are_orthogonalized_separately(updated):
    """Heads with equal gradients still move at full length."""

    def repeat(gradients):
        for first in (0, 32, 64):  # q, k and v, of four heads of 8 rows
            of = gradients["blocks.0.attn.qkv.w"]
            of[first + 8 : first + 16] = of[first : first + 8]

    found = updated(replace(MODEL, n_kv_head=4), repeat)
    (moved,) = (values for spec, values in found.items() if spec.name == "blocks.0.attn.qkv.w")
    np.testing.assert_allclose([np.linalg.norm(part) for part in np.split(moved, 3)], np.sqrt(32), rtol=0.1)


def test_update_moves_equally_in_every_direction(updated):
    for spec, moved in updated(MODEL).items():
        if spec.group != MATRIX:
            assert 0 < abs(moved).max() < 0.11 / CONFIG.lr, spec.name
            continue
        for rows, columns in parts_of(spec):
            part, moved = moved[:rows], moved[rows:]
            length = np.linalg.norm(part) / max(1, rows / columns) ** 0.5 / min(rows, columns) ** 0.5
            assert 0.85 < length < 1.15, spec.name


def test_muon_decay_falls_with_the_rate():
    config = replace(CONFIG, steps=100, warmup=10, schedule="wsd", decay_fraction=0.5, weight_decay=0.2)
    early, late = (muon_scalars(config, step, learning_rate(config, step), 1.0, 1.0) for step in (20, 99))
    assert early.weight_decay == 0.2 and late.weight_decay == pytest.approx(0.2 * 0.02)
    assert 0.85 < early.momentum < late.momentum < config.momentum


def test_groups_have_separate_learning_rates():
    config = replace(CONFIG, embedding_lr=0.3, head_lr=0.0, vector_lr=0.01, warmup=0, schedule="constant")
    scale, clip, _, *groups = step_scalars(config, 0, config.lr, 0.5, 0.25)
    assert (scale, clip) == (0.5, 2 * config.clip)
    rates = np.reshape(groups, (-1, 2))[:, 0] * (1 - config.beta1)
    assert rates == pytest.approx([0.02, 0.3, 0.3, 0.02, 0.01])  # value_lr is embedding_lr
    own = step_scalars(replace(config, value_lr=0.1), 0, config.lr, 0.5, 0.25)
    assert own[7] == pytest.approx(0.1 / (1 - config.beta1))
    decaying = step_scalars(replace(config, table_decay=0.3), 0, config.lr / 2, 0.5, 0.25)
    assert decaying[4::2] == pytest.approx([1, 1, 1 - 0.01 * 0.3, 1 - 0.01 * 0.3, 1])
    plain = step_scalars(replace(config, optimizer="adamw"), 0, config.lr, 0.5, 0.25)
    assert plain[4::2] == pytest.approx([1 - rate * config.weight_decay for rate in rates[:4]] + [1.0])


def test_borders_cut_no_matrix():
    layout = Architecture(MODEL).layout
    specs = [spec for spec in layout.specs if spec.group == MATRIX]
    matrices = [(start := layout.offsets[spec.name], start + spec.size) for spec in specs]
    for parts in range(1, 40):
        bounds = borders(layout, parts, lambda spec: spec.size)
        assert len(bounds) == parts + 1 and bounds == sorted(bounds)
        assert bounds[0] == 0 and bounds[-1] == layout.size
        for bound in bounds:
            assert bound % ALIGNED == 0 and not any(start < bound < stop for start, stop in matrices)


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_share_muon_updates(ranks):
    weights, optimizer, read = trained(SerialComm())
    for how in ({}, {"grad_sync": "sharded"}, {"grad_sync": "overlapped"}):
        found = on_all_ranks(ranks, lambda comm, how=how: trained(comm, **how))
        for others, part, numbers in found:
            np.testing.assert_allclose(others.flat, weights.flat, atol=2e-5, err_msg=str(how))
            np.testing.assert_allclose(numbers, read, rtol=1e-4)
            np.testing.assert_allclose(part.m.flat, optimizer.m.flat[part.own], atol=2e-6)
            np.testing.assert_allclose(part.v.flat, optimizer.v.flat[part.v_own], atol=2e-6)
        for others, *_ in found[1:]:
            np.testing.assert_array_equal(others.flat, found[0][0].flat)


def test_reproducible_parts_match_on_any_ranks():
    how = {"reproducible_parts": 4}
    weights, *_ = trained(SerialComm(), **how, grad_accum=4)
    for ranks in (2, 4):
        found = on_all_ranks(ranks, lambda comm, ranks=ranks: trained(comm, **how, grad_accum=4 // ranks))
        assert all(np.array_equal(others.flat, weights.flat) for others, *_ in found)


RECIPE = ["--optimizer", "muon", "--lr", "0.02", "--set", "embedding_lr=0.1", "--schedule", "constant"]
RECIPE += ["--save-every", "5", "--n-head", "4", "--n-kv-head", "2", "--positions", "rope"]


@slow_ranks
def test_muon_runs_resume_and_move_between_ranks(tmp_path):
    whole = train(tmp_path / "whole", "--steps", "10", *RECIPE)
    begin = ["train", *SMALL, *RECIPE, "--stage", "mpi", "--out"]
    resume = ["train", "--stage", "mpi", "--threads", "1", "--steps", "10", "--resume", "auto", "--out"]
    ways = {sync: ["--grad-sync", sync] for sync in ("allreduce", "sharded")} | {"local": ["--outer-every", "5"]}
    jobs = [[*begin, tmp_path / "moved", "--steps", "5", "--grad-sync", "sharded"]]
    for name, how in ways.items():
        jobs += [[*begin, tmp_path / name, "--steps", "5", *how], [*resume, tmp_path / name]]
        jobs.append([*begin, tmp_path / f"{name}-whole", "--steps", "10", *how])
    assert all(ended == ("", {0}) for ended in in_one_job(jobs, ranks=2))
    for name in ways:
        assert losses(tmp_path / name) == losses(tmp_path / f"{name}-whole"), name
    train(tmp_path / "moved", "--steps", "10", "--resume", "auto", *RECIPE)
    for name in ("allreduce", "sharded", "moved"):
        np.testing.assert_allclose(losses(tmp_path / name), losses(whole), rtol=1e-5)
