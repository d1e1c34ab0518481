"""Mistakes in a class that extends distgpt are reported in a line."""

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
    """A kind that trains the biases and leaves the rest."""

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
    """The row by which files of biases are read."""

    def layout(self, run):
        return BIASES.trained(run)

    def refuse_damaged(self, run, path):
        """Refuse nothing."""

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


@pytest.mark.parametrize(
    "words, members, settings",
    [
        ("checked", {"reject_unsuited": refuse}, {}),
        ("'Biases'", {"model": train_biases}, {"bias": False}),  # which trains nothing
        ("format .*'biases'", {"model": train_biases}, {"bias": True}),  # whose files nothing reads
        ("without a part", {"model": lambda self, t: UNNAMED}, {"bias": True}),
    ],
)
def test_mistakes_are_refused_before_a_run_is_written(extended, tmp_path, words, members, settings):
    extended(**members)
    with pytest.raises(UsageError, match=words):
        distgpt.train(**SIZE, norm="layernorm", **settings, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_file_of_a_part_that_is_not_known_is_named(extended, tmp_path):
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
def test_vectors_are_trained_beside_matrices_that_are_not(norm):
    """Each gradient is what it is where all is trained: that of a bias, and that of the embeddings' norm."""
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
    """Ends the run after its first step, or makes a mistake."""

    def __init__(self, run, answer):
        super().__init__()
        self.run, self.answer = run, answer

    def after_step(self, done):
        return self.answer(self.run)


def end(run):
    run.signals.note(signal.SIGTERM, why="a file STOP is there")
    return {}


@pytest.mark.parametrize(
    "answer, error, words",
    [
        (lambda run: {}[7], DistgptError, r"Callback .*: KeyError: 7 \(.*test_attached.py:\d"),
        (lambda run: {"loss": 7.0}, DistgptError, "Callback .*: .*records loss"),
        (end, Interrupted, "a file STOP is there"),
    ],
)
def test_a_guard_that_fails_is_named_and_one_may_end_the_run(extended, tmp_path, answer, error, words):
    extended(callbacks=lambda self, run, limits: [Callback(run, answer)])
    with pytest.raises(error, match=words) as ended:
        distgpt.train(**SIZE, out=tmp_path / "run")
    assert error is DistgptError or ended.value.exit_code == 143


def test_a_learning_rate_that_is_no_number_names_its_class(extended, tmp_path):
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
def test_a_class_with_a_mistake_is_a_line_before_anything_is_written(name, tmp_path, monkeypatch):
    (tmp_path / "mistakes.py").write_text(FILE_OF_MISTAKES)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DISTGPT_COMPONENTS", "")  # which the option sets: undone at the end
    train = ["train", "--components", name, "--out", tmp_path / "run", "--steps", "1", "--data", "story"]
    for words, env in ((train, {}), (["infer"], {"DISTGPT_COMPONENTS": name})):
        monkeypatch.delitem(sys.modules, "mistakes", raising=False)
        result = inside(*words, env=env, cwd=tmp_path)
        assert result.returncode == 2 and MISTAKES[name] in result.stderr, result.stderr
        assert "Traceback" not in result.stderr and not (tmp_path / "run").exists()


def test_votes_that_an_exchange_has_mixed_with_gradients_are_no_votes():
    assert StepFlags.parse_flags([0, 2, 0, 0, 0, 0, 0.5], "mine").elapsed == 0.5
    for wrong in (0.25, -1.0, math.nan):
        with pytest.raises(DistgptError, match="--grad-sync mine returned invalid step flags"):
            StepFlags.parse_flags([0, 0, 0, 0, 0, wrong, 0.5], "mine")


class Pieces(BytesDecoder):
    size = 1
    kind = "pieces"

    def encode(self, text):
        return np.array([0] * len(text.split()))


def test_ids_that_are_no_slices_of_a_text_have_no_ends_in_it():
    assert encode_parts(Pieces([b"word"]), ["word"])[1].tolist() == [4]
    with pytest.raises(DataError, match="'pieces' cannot encode chats"):
        encode_parts(Pieces([b"word"]), ["two words"])
