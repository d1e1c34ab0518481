"""Mistakes in a class that extends distgpt are one-line errors."""

import contextlib
import math
import signal
import sys
from dataclasses import replace

import distgpt
import numpy as np
import pytest
from distgpt.assembly import AllComponents
from distgpt.core.base.errors import DataError, DistgptError, UsageError
from distgpt.core.base.interrupts import Interrupted
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import ModelConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.data.tokenizers import BytesDecoder
from distgpt.core.model.memory import Layout
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.passes import Pass
from distgpt.core.saved.modelfile import Base, Description, read_description
from distgpt.core.train.interfaces import ModelKind, StepFlags
from distgpt.corpora.chats.format import encode_parts
from distgpt.models.adapters import merge
from distgpt.show.weightspage import inspect

from conftest import inside, losses

SIZE = {"preset": "tiny-adamw", "n_layer": 1, "n_head": 2, "n_embd": 16, "seq_len": 16, "batch_size": 4}
SIZE |= {"data": "story", "steps": 3, "threads": 1}


class Biases(ModelKind):
    part = "biases"

    def trained(self, run):
        return Layout(spec for spec in Architecture(run.model).layout.specs if spec.name.endswith(".b"))

    def build(self, run, kernels):
        architecture, trained = Architecture(run.model), self.trained(run)
        specs = [spec for spec in architecture.layout.specs if spec.name not in trained.offsets]
        return Model(architecture, kernels, trained, {each.name: kernels.zeros(*each.shape) for each in specs})

    def describe(self, comm, run, tokenizer):
        base = Base("base", "0") if self.part else None
        return Description(run, tokenizer, part=self.part, base=base)


class Unnamed(Biases):
    part = ""


class BiasFile:
    def layout(self, run):
        return BIASES.trained(run)

    def refuse_damaged(self, run, path):
        """Accept any file."""

    def describe(self, run):
        return "biases of"

    def refuse_alone(self, path):
        raise UsageError(f"{path} holds biases alone")


BIASES, UNNAMED, FILE = Biases(), Unnamed(), BiasFile()


def part_file(self, format):
    return FILE if format == "biases" else AllComponents.part(self, format)


def train_biases(self, t):
    return BIASES


def refuse(self, t, ranks, on_gpu):
    raise UsageError("checked")


@pytest.mark.parametrize("words, members, settings", [
    ("checked", {"reject_unsuited": refuse}, {}),
    ("'Biases'", {"model": train_biases}, {"bias": False}),  # no trained tensors
    ("format .*'biases'", {"model": train_biases}, {"bias": True}),  # no reader for its files
    ("without a part", {"model": lambda self, t: UNNAMED}, {"bias": True}),
])  # fmt: skip
def test_extension_mistakes_are_rejected_before_writing(extended, tmp_path, words, members, settings):
    extended(**members)
    with pytest.raises(UsageError, match=words):
        distgpt.train(**SIZE, norm="layernorm", **settings, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_unknown_part_format_is_named(extended, tmp_path):
    extended(model=train_biases, parts=("distgpt-adapter", "biases"), part=part_file)
    trained = distgpt.train(**SIZE, bias=True, norm="layernorm", out=tmp_path / "run")
    weights = trained.directory / "weights.safetensors"
    assert read_description(weights).part == "biases" and len(losses(trained.directory)) == 3
    assert inspect(weights)["what"] == "biases of base"
    extended(parts=("distgpt-adapter", "biases"), part=part_file)
    base = distgpt.train(**SIZE, out=tmp_path / "base").directory / "weights.safetensors"
    with pytest.raises(UsageError, match="'biases'"):
        merge(base, weights, tmp_path / "merged", SerialComm())
    extended()
    with pytest.raises(DataError, match="has the unknown format 'biases'; known: distgpt-ad"):
        read_description(weights)
    with pytest.raises(DataError, match="'biases'"):
        inspect(weights)


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_vectors_train_with_frozen_matrices(norm):
    """Each gradient equals the gradient of a fully trained model."""
    config = ModelConfig(vocab_size=9, seq_len=8, n_layer=2, n_embd=16, n_head=2, norm=norm, mlp="gelu")
    config = replace(config, bias=norm == "layernorm", qkv_bias=True, embed_norm=True)
    tokens = np.arange(16, dtype=np.int32) % 9
    whole = Model(Architecture(config), CpuKernels(threads=1))
    whole.initialise(1)
    layout = Layout(spec for spec in whole.layout.specs if not spec.is_matrix)
    part = Model(Architecture(config), whole.kernels, layout, whole.params)
    for name, array in part.params.items():
        array[...] = whole.params[name]
    for model in (whole, part):
        model.allocate_master_weights()
        model.make_gradients()
        model.grads.flat[...] = np.nan
        for accumulate in (False, True):
            Pass(model, 2, 8, training=True).loss_and_gradients(tokens, tokens[::-1], 1.0, accumulate)
    assert 0 < len(part.grads) < len(whole.grads)
    for name, gradient in part.grads.items():
        np.testing.assert_array_equal(gradient, whole.grads[name], name)


class Callback(contextlib.nullcontext):
    def __init__(self, run, answer):
        super().__init__()
        self.run, self.answer = run, answer

    def after_step(self, done):
        return self.answer(self.run)


def end(run):
    run.signals.note(signal.SIGTERM, why="a file STOP is there")
    return {}


@pytest.mark.parametrize("answer, error, words", [
    (lambda run: {}[7], DistgptError, r"Callback .*: KeyError: 7 \(.*test_attached.py:\d"),
    (lambda run: {"loss": 7.0}, DistgptError, "Callback .*: .*records loss"),
    (end, Interrupted, "a file STOP is there"),
])  # fmt: skip
def test_failing_callback_is_named(extended, tmp_path, answer, error, words):
    extended(callbacks=lambda self, run, limits: [Callback(run, answer)])
    with pytest.raises(error, match=words) as ended:
        distgpt.train(**SIZE, out=tmp_path / "run")
    assert error is DistgptError or ended.value.exit_code == 143


def test_invalid_learning_rate_names_its_class(extended, tmp_path):
    extended(learning_rate=lambda self, t, step, elapsed=None: math.nan if step else t.lr)
    with pytest.raises(UsageError, match=r"Extended\.learning_rate returned nan for step 2"):
        distgpt.train(**SIZE, out=tmp_path / "run")


MISTAKES = {
    "missing:Mine": "no module named 'missing'",
    "mistakes:Mine": "mistakes has no class 'Mine'",
    "mistakes:Other": "must be a subclass of distgpt.assembly.AllComponents",
    "mistakes:Spelled": "budgets overrides no method; did you mean 'budget'",
    "mistakes:Called": "mistakes.py:9: Called.slots must take (self, model), not (self)",
    "broken:Mine": "requires nothing_of_this_name",
}
FILE_OF_MISTAKES = """from distgpt.assembly import AllComponents
class Other: ...

class Spelled(AllComponents):
    def budgets(self): ...

class Called(AllComponents):

    def slots(self): ...
"""


@pytest.mark.parametrize("name", MISTAKES)
def test_component_mistakes_are_one_line_errors(name, tmp_path, monkeypatch):
    (tmp_path / "mistakes.py").write_text(FILE_OF_MISTAKES)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DISTGPT_COMPONENTS", "")  # set by the option, undone at the end
    train = ["train", "--components", name, "--out", tmp_path / "run", "--steps", "1", "--data", "story"]
    for words, env in ((train, {}), (["infer"], {"DISTGPT_COMPONENTS": name})):
        monkeypatch.delitem(sys.modules, "mistakes", raising=False)
        result = inside(*words, env=env, cwd=tmp_path)
        assert result.returncode == 2 and MISTAKES[name] in result.stderr, result.stderr
        assert "Traceback" not in result.stderr and not (tmp_path / "run").exists()


def test_mixed_step_flags_are_rejected():
    assert StepFlags.parse_flags([0, 2, 0, 0, 0, 0, 0.5], "mine").elapsed == 0.5
    for wrong in (0.25, -1.0, math.nan):
        with pytest.raises(DistgptError, match="--grad-sync mine returned invalid step flags"):
            StepFlags.parse_flags([0, 0, 0, 0, 0, wrong, 0.5], "mine")


class Pieces(BytesDecoder):
    size = 1
    kind = "pieces"

    def encode(self, text):
        return np.array([0] * len(text.split()))


def test_chat_encoding_requires_text_slices():
    assert encode_parts(Pieces([b"word"]), ["word"])[1].tolist() == [4]
    with pytest.raises(DataError, match="'pieces' cannot encode chats"):
        encode_parts(Pieces([b"word"]), ["two words"])
