"""Mistakes in a class that extends distgpt are reported in a line."""

import math
import signal
from contextlib import AbstractContextManager
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
from distgpt.core.train.seams import ModelKind, Votes
from distgpt.corpora.chats.format import encode_parts
from distgpt.models.adapters import merge
from distgpt.show.weightspage import inspect

from conftest import distgpt as command
from conftest import losses

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


def check(self, t, ranks, on_gpu):
    raise UsageError("checked")


def test_settings_are_checked_before_a_run_is_written(extended, tmp_path):
    extended(refuse_unsuited=check)
    with pytest.raises(UsageError, match="checked"):
        distgpt.train(**SIZE, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_kind_that_trains_nothing_of_a_model_is_refused(extended, tmp_path):
    extended(model=train_biases)
    with pytest.raises(UsageError, match="nothing that a kind of model 'Biases' trains"):
        distgpt.train(**SIZE, bias=False, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "kind, said", [(BIASES, "format 'biases' is not known here"), (UNNAMED, "without a part does not hold the tensors")]
)
def test_a_kind_whose_files_nothing_reads_is_refused_before_it_trains(extended, tmp_path, kind, said):
    extended(model=lambda self, t: kind)
    with pytest.raises(UsageError, match=said):
        distgpt.train(**SIZE, bias=True, norm="layernorm", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_file_of_a_part_that_is_not_known_is_named(extended, tmp_path):
    extended(model=train_biases, parts=("distgpt-adapter", "biases"), part=part_file)
    trained = distgpt.train(**SIZE, bias=True, norm="layernorm", out=tmp_path / "run")
    weights = trained.directory / "weights.safetensors"
    assert read_description(weights).part == "biases" and len(losses(trained.directory)) == 3
    assert inspect(weights)["what"] == "biases of base"
    extended(parts=("distgpt-adapter", "biases"), part=part_file)
    base = distgpt.train(**SIZE, out=tmp_path / "base").directory / "weights.safetensors"
    with pytest.raises(UsageError, match="a part of kind 'biases'"):
        merge(base, weights, tmp_path / "merged", SerialComm())
    extended()
    with pytest.raises(DataError, match="holds a part of kind 'biases', not known here; known: distgpt-ad"):
        read_description(weights)
    with pytest.raises(DataError, match="holds a part of kind 'biases'"):
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


class Ending(AbstractContextManager):
    """A guard that ends the run after its first step."""

    def __init__(self, run):
        self.signals = run.signals

    def __exit__(self, *ended):
        """Leave nothing behind."""

    def after_step(self, done):
        self.signals.note(signal.SIGTERM, why="a file STOP is there")
        return {}


class Failing(Ending):
    def after_step(self, done):
        return {}[7]


class Replacing(Ending):
    def after_step(self, done):
        return {"loss": 7.0}


def test_a_guard_that_fails_is_named_in_a_line(extended, tmp_path):
    extended(callbacks=lambda self, run, limits: [Failing(run)])
    with pytest.raises(DistgptError, match=r"the guard Failing has failed: KeyError: 7 \(.*test_attached.py:\d"):
        distgpt.train(**SIZE, out=tmp_path / "run")


def test_a_guard_cannot_replace_the_loss(extended, tmp_path):
    extended(callbacks=lambda self, run, limits: [Replacing(run)])
    with pytest.raises(DistgptError, match=r"Replacing has failed: .*the run itself records loss"):
        distgpt.train(**SIZE, out=tmp_path / "run")


def test_a_guard_says_why_it_ends_a_run(extended, tmp_path):
    extended(callbacks=lambda self, run, limits: [Ending(run)])
    with pytest.raises(Interrupted, match="a file STOP is there") as ended:
        distgpt.train(**SIZE, out=tmp_path / "run")
    assert ended.value.exit_code == 143


MISTAKES = {
    "missing:Mine": "Python finds no module 'missing'",
    "mistakes:Mine": "mistakes has no class 'Mine'",
    "mistakes:Other": "must be a class derived from distgpt.assembly.AllComponents",
    "mistakes:Spelled": "budgets overrides no method; did you mean 'budget'",
    "mistakes:Called": "mistakes.py:9: Called.slots must take (self, model), not (self)",
    "broken:Mine": "needs nothing_of_this_name",
}
FILE_OF_MISTAKES = """from distgpt.assembly import AllComponents
class Other: ...

class Spelled(AllComponents):
    def budgets(self): ...

class Called(AllComponents):

    def slots(self): ...
"""


@pytest.mark.ci
@pytest.mark.parametrize("name", MISTAKES)
def test_a_class_with_a_mistake_is_a_line_before_anything_is_written(name, tmp_path):
    (tmp_path / "mistakes.py").write_text(FILE_OF_MISTAKES)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    words = ["--components", name, "--out", tmp_path / "run", "--steps", "1", "--data", "story"]
    result = command("train", *words, env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path)
    assert result.returncode == 2 and MISTAKES[name] in result.stderr, result.stderr
    assert "Traceback" not in result.stderr and not (tmp_path / "run").exists()
    named = command("infer", env={"PYTHONPATH": str(tmp_path), "DISTGPT_COMPONENTS": name}, cwd=tmp_path)
    assert named.returncode == 2 and MISTAKES[name] in named.stderr


def test_votes_that_an_exchange_has_mixed_with_gradients_are_no_votes():
    assert Votes.read_votes([0, 2, 0, 0, 0, 0, 0.5], "mine").elapsed == 0.5
    for wrong in (0.25, -1.0, math.nan):
        with pytest.raises(DistgptError, match="--grad-sync mine has mixed the ranks' votes"):
            Votes.read_votes([0, 0, 0, 0, 0, wrong, 0.5], "mine")


class Pieces(BytesDecoder):
    size = 1
    kind = "pieces"

    def encode(self, text):
        return np.array([0] * len(text.split()))


def test_ids_that_are_no_slices_of_a_text_have_no_ends_in_it():
    assert encode_parts(Pieces([b"word"]), ["word"])[1].tolist() == [4]
    with pytest.raises(DataError, match="'pieces' cannot encode chats"):
        encode_parts(Pieces([b"word"]), ["two words"])


def test_a_learning_rate_that_is_no_number_names_its_class(extended, tmp_path):
    extended(learning_rate=lambda self, t, step, elapsed=None: math.nan if step else t.lr)
    with pytest.raises(UsageError, match=r"Extended\.learning_rate returned nan for step 2"):
        distgpt.train(**SIZE, out=tmp_path / "run")
