"""Tokens in one compiled call against the forward pass: all variants, odd sizes, lanes of any length."""

import numpy as np
import pytest
from distgpt.core.config import MLPS, ModelConfig
from distgpt.core.cpu.kernels import Bfloat16Kernels, CpuKernels
from distgpt.core.generate.engine_setup import slot_bytes, slots_for
from distgpt.core.generate.slots import Feed
from distgpt.core.model.model import Architecture, Model
from distgpt.core.ops.kernels import Kernels
from distgpt.inference.decoding import compiled
from distgpt.inference.decoding.compiled import CompiledSlots
from distgpt.inference.quantized.integers import quantise, restored
from distgpt.inference.quantized.kernels import Int8Kernels
from distgpt.models.quantized.packed import int8_of
from distgpt.models.quantized.rounded import bits_of
from plain_int4 import quantise4
from test_lanes import plain_scores

VARIANTS = {
    "gpt2": {},
    "llama": {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "bias": False, "tied": False},
    "odd": {"n_embd": 66, "n_head": 3, "mlp_width": 101, "vocab_size": 129, "embed_norm": True},
    "bare": {"norm_gain": False, "bias": False, "final_norm": False, "positions": "none", "mlp": "relu"},
    "rms": {"norm": "rmsnorm", "mlp": "swiglu", "n_embd": 70, "n_head": 5, "norm_gain": False, "tied": False},
    "fast": {"norm": "rmsnorm", "norm_gain": False, "mlp": "relu2", "positions": "rope", "qk_norm": True}
    | {"value_embeddings": True, "n_layer": 3, "n_head": 4, "n_kv_head": 2},
    "grouped": {"n_embd": 66, "n_head": 6, "n_kv_head": 2},
    "one key": {"n_head": 4, "n_kv_head": 1, "positions": "rope", "rope_base": 50.0, "qk_norm": True},
    "own head": {"n_head": 4, "n_kv_head": 2, "head_dim": 10, "positions": "rope", "qk_norm": True}
    | {"qk_norm_gain": True, "bias": False, "qkv_bias": True, "rope_scaling": "linear"},
    "small heads": {"n_head": 2, "head_dim": 6, "norm": "rmsnorm", "mlp": "swiglu", "mlp_width": 37},
    "windows": {"n_layer": 3, "window": 5, "full_every": 2, "positions": "rope", "n_kv_head": 1},
    "short": {"window": 17, "full_every": 0},
    "wide": {"n_embd": 32, "n_head": 1, "mlp_width": 1100, "positions": "rope", "embed_norm": True},
}
_TRIED = {shape.get("mlp", "gelu") for shape in VARIANTS.values()}
VARIANTS |= {mlp: {"mlp": mlp} for mlp in MLPS if mlp not in _TRIED}
TYPES = {
    "float32": lambda threads: CpuKernels("float32", threads),
    "bfloat16": Bfloat16Kernels,
    "int8": Int8Kernels,
    "int4": lambda threads: Int8Kernels(threads, "int4"),
}
# Each is compiled anew; bfloat16 shares its cache with int8, its weights with training.
KINDS = ["float32", pytest.param("bfloat16", marks=pytest.mark.slow), "int8", "int4"]
LENGTHS = (1, 2, 15, 33, 50)


@pytest.fixture(autouse=True)
def all_threads(monkeypatch):
    monkeypatch.setattr(compiled, "WORTHWHILE", 0)


def config_of(variant):
    sizes = {"vocab_size": 97, "seq_len": 50, "n_layer": 2, "n_head": 2, "n_embd": 48}
    return ModelConfig(**(sizes | VARIANTS[variant]))


def build(variant, kernels):
    """A model whose gains and biases are random too, and the same in every type."""
    model = Model(Architecture(config_of(variant)), kernels)
    random = np.random.default_rng(7)
    for spec in model.layout.specs:
        values = random.normal(0, 0.1 if spec.is_matrix else 0.3, spec.shape)
        kernels.put(model.params[spec.name], values + (spec.name.endswith(".w") and not spec.is_matrix))
    return int8_of(model, kernels) if isinstance(kernels, Int8Kernels) else model


def round_alike(x, spec, dtype):
    bits = bits_of(spec, dtype)
    return restored((quantise if bits == 8 else quantise4)(x)) if bits else x


def lanes_of(variant, kind, count, threads=2):
    return CompiledSlots(build(variant, TYPES[kind](threads)), count)


def sequences(variant):
    random = np.random.default_rng(3)
    return [random.integers(0, config_of(variant).vocab_size, length).tolist() for length in LENGTHS]


def distance(found, expected):
    return np.abs(found - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_are_those_of_the_forward_pass(variant, kind):
    exact = build(variant, Kernels("float64"))
    for spec in exact.layout.specs if kind == "int4" else ():  # int8 differs by less than the tolerance
        exact.params[spec.name][:] = round_alike(exact.params[spec.name].astype(np.float32), spec, kind)
    lanes, texts = lanes_of(variant, kind, len(LENGTHS)), sequences(variant)
    tolerance = {"float32": 3e-6, "bfloat16": 4e-2, "int8": 6e-2, "int4": 6e-2}[kind]
    found = lanes.feed([Feed(i, 0, text[: len(text) // 2], 0) for i, text in enumerate(texts) if text[1:]])
    assert found.shape == (0, exact.config.vocab_size)
    rest = [Feed(i, len(text) // 2, text[len(text) // 2 :], 1 + (i > 2)) for i, text in enumerate(texts)]
    scores = lanes.feed(rest)
    expected = [plain_scores(exact, text)[-each.wanted :] for text, each in zip(texts, rest, strict=True)]
    assert scores.dtype == np.float32
    assert distance(scores, np.concatenate(expected)) < tolerance


@pytest.mark.parametrize(
    "variant, kind", [("llama", "float32"), ("odd", "float32"), ("odd", "int8"), ("odd", "int4"), ("short", "float32")]
)
def test_a_sequence_gets_the_same_bits_alone_or_not_in_pieces_or_not_on_any_number_of_threads(variant, kind):
    texts, found = sequences(variant), []
    for threads in (1, 2, 3):
        lanes = lanes_of(variant, kind, len(LENGTHS), threads)
        whole = lanes.feed([Feed(i, 0, text, len(text)) for i, text in enumerate(texts)])
        alone = [lanes.feed([Feed(0, 0, text, len(text))]) for text in texts]
        steps = [
            np.concatenate([lanes.feed([Feed(1, at, [token], 1)]) for at, token in enumerate(text)]) for text in texts
        ]
        found += [whole, np.concatenate(alone), np.concatenate(steps)]
    assert len({scores.tobytes() for scores in found}) == 1


def test_work_beyond_the_memory_for_rows_goes_through_in_parts(monkeypatch):
    texts = sequences("llama")
    work = [Feed(i, 0, text, min(3, len(text))) for i, text in enumerate(texts)]
    at_once = lanes_of("llama", "float32", len(texts)).feed(work)
    monkeypatch.setattr(compiled, "ROWS", 7)
    small = lanes_of("llama", "float32", len(texts))
    assert small._most == 7
    np.testing.assert_array_equal(small.feed(work), at_once)
    monkeypatch.setattr(compiled, "ROOM", 1)
    assert lanes_of("llama", "float32", 3)._most == 3  # a row for each lane


@pytest.mark.parametrize("kind", ["float32", "int8", "float64"])
def test_lanes_take_the_memory_that_they_say(kind):
    """With heads and a context that are padded to whole panels, and in int8 with a cache in bfloat16."""
    model = build("odd", (TYPES | {"float64": lambda threads: CpuKernels("float64", threads)})[kind](1))
    lanes = slots_for(model, 3)
    if kind == "float64":
        lanes.feed([Feed(i, 0, [1], 1) for i in range(3)])
        taken = sum(cache.nbytes for cache in lanes._caches) + lanes._logits.nbytes
    else:
        taken = sum(array.nbytes for array in lanes._cache)
    assert taken == 3 * slot_bytes(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lane_can_be_copied_and_used_again_even_after_nan(kind):
    lanes, text = lanes_of("gpt2", kind, 3), sequences("gpt2")[3]
    expected = lanes.feed([Feed(0, 0, text, 1)])
    for array in lanes._cache:
        array[:, 1:] = 0x7FC0 if array.dtype == np.uint16 else np.nan
    lanes.feed([Feed(0, 0, text[:-1], 0)])
    lanes.copy(0, 2, len(text) - 1)
    np.testing.assert_array_equal(lanes.feed([Feed(2, len(text) - 1, text[-1:], 1)]), expected)
    np.testing.assert_array_equal(lanes.feed([Feed(1, 0, text, 1)]), expected)


@pytest.mark.parametrize(
    "feed",
    [
        *(Feed(2, 0, [1], 1), Feed(0, 50, [1], 1), Feed(0, -1, [1], 1), Feed(0, 0, [97], 1)),
        *(Feed(0, 0, [1], 2), Feed(0, 0, [1], -1), Feed(1, 0, [1], 1)),
    ],
)
def test_what_does_not_fit_is_refused(feed):
    lanes = lanes_of("gpt2", "float32", 2)
    assert lanes.feed([]).shape == (0, 97)
    with pytest.raises(ValueError, match=r"does not fit 2 slots of 50|must lie in \[0, 97\)|a slot occurs twice"):
        lanes.feed([Feed(1, 0, [3, 4], 1), feed])
