"""What somebody hangs on the core by rows of tables: mistakes in it are refused in a line."""

import math
import signal
from contextlib import AbstractContextManager
from dataclasses import replace

import numpy as np
import pytest
from conftest import losses

import distgpt
from distgpt.adapters.adapter import merge
from distgpt.components import TABLES
from distgpt.core.base import tables
from distgpt.core.base.errors import DataError, DistgptError, UsageError
from distgpt.core.base.interrupts import Interrupted, PendingSignals
from distgpt.core.comm.serial import SerialComm
from distgpt.core.config import ModelConfig, TrainConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.data.tokenizers import BytesDecoder, ByteTokenizer, TokenizerKind, load_tokenizer
from distgpt.core.model.memory import Layout
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.passes import Pass
from distgpt.core.saved.modelfile import Base, Description, read_description
from distgpt.core.train.seams import ModelKind, Votes
from distgpt.show.weightspage import inspect
from distgpt.texts.tokenizers.parts import encode_parts

SIZE = {"preset": "tiny-adamw", "n_layer": 1, "n_head": 2, "n_embd": 16, "seq_len": 16, "batch_size": 4}
SIZE |= {"data": "story", "steps": 3, "threads": 1}


@pytest.fixture
def handed_in(monkeypatch):
    """Hand in rows that lie in this file, beside the others."""

    def hand_in(table, **rows):
        paths = {name: f"{__name__}:{row}" for name, row in rows.items()}
        monkeypatch.setitem(tables._paths, table, {**TABLES[table], **paths})

    return hand_in


class Biases(ModelKind):
    """A kind that trains the biases and leaves the rest."""

    part = "biases"

    def trained(self, run):
        return Layout(spec for spec in Architecture(run.model).layout.specs if spec.name.endswith(".b"))

    def build(self, run, kernels):
        architecture, trained = Architecture(run.model), self.trained(run)
        specs = [spec for spec in architecture.layout.specs if spec.name not in trained.offsets]
        return Model(
            architecture, kernels, trained, {each.name: kernels.zeros(*each.shape) for each in specs}
        )

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


def check(t, ranks, on_gpu):
    raise UsageError("checked")


@pytest.mark.parametrize("table, setting", [("models", "adapter_kind"), ("exchanges", "grad_sync")])
def test_what_a_row_does_not_go_with_is_asked_by_its_name(handed_in, table, setting, tmp_path):
    handed_in(table, mine="BIASES")
    handed_in("checks", mine="check")
    assert "mine" in TrainConfig(**{setting: "mine"}).components
    with pytest.raises(UsageError, match="checked"):
        distgpt.train(**SIZE, **{setting: "mine"}, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_kind_that_trains_nothing_of_a_model_is_refused(handed_in, tmp_path):
    handed_in("models", biases="BIASES")
    with pytest.raises(UsageError, match="nothing that a kind of model 'biases' trains"):
        distgpt.train(**SIZE, bias=False, adapter_kind="biases", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "row, said",
    [
        ("BIASES", "format 'biases' is not known here"),
        ("UNNAMED", "without a part does not hold the tensors"),
    ],
)
def test_a_kind_whose_files_nothing_reads_is_refused_before_it_trains(handed_in, tmp_path, row, said):
    handed_in("models", biases=row)
    with pytest.raises(UsageError, match=said):
        distgpt.train(**SIZE, bias=True, norm="layernorm", adapter_kind="biases", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_file_of_a_part_that_is_not_known_is_named(handed_in, tmp_path):
    how = {**SIZE, "bias": True, "norm": "layernorm", "adapter_kind": "biases"}
    handed_in("models", biases="BIASES")
    handed_in("part files", biases="FILE")
    trained = distgpt.train(**how, out=tmp_path / "run")
    weights = trained.directory / "weights.safetensors"
    assert read_description(weights).part == "biases" and len(losses(trained.directory)) == 3
    assert inspect(weights)["what"] == "biases of base"
    base = distgpt.train(**SIZE, out=tmp_path / "base").directory / "weights.safetensors"
    with pytest.raises(UsageError, match="a part of kind 'biases', and no adapter"):
        merge(base, weights, tmp_path / "merged", SerialComm())
    handed_in("part files")
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
        model.train()
        model.make_gradients()
        model.grads.flat[...] = np.nan
        for accumulate in (False, True):
            Pass(model, 2, 8, training=True).loss_and_gradients(tokens, tokens[::-1], 1.0, accumulate)
    assert 0 < len(part.grads) < len(whole.grads)
    for name, gradient in part.grads.items():
        np.testing.assert_array_equal(gradient, whole.grads[name], name)


class Low(ByteTokenizer):
    kind = "low"


LOW = TokenizerKind("lower", from_name=lambda argument: Low(), from_json=lambda document, source: Low())


def test_a_tokenizer_whose_kind_is_not_its_name_in_the_table_is_refused(handed_in):
    handed_in("tokenizers", lower="LOW")
    with pytest.raises(UsageError, match="lower makes a tokenizer of kind 'low', which no row"):
        load_tokenizer("lower")
    handed_in("tokenizers", lower="LOW", low="LOW")
    assert load_tokenizer("lower").kind == "low"


def test_adapters_without_a_rank_do_not_become_a_whole_model(tmp_path):
    with pytest.raises(UsageError, match="--adapter-kind lora needs a rank"):
        distgpt.train(**SIZE, adapter_kind="lora", out=tmp_path / "run")


def test_signals_that_end_no_run_cannot_be_noted():
    signals = PendingSignals()
    with pytest.raises(ValueError, match="SIGALRM ends no run: note one of SIGTERM"):
        signals.note(signal.SIGALRM)
    assert not any(signals.counts()) and signals.note(signal.SIGUSR2)
    assert signals.exit_code == 75


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
        """Return nothing, as somebody may."""


def test_a_guard_that_fails_is_named_in_a_line(handed_in, tmp_path):
    handed_in("guards", mine="Failing")
    with pytest.raises(DistgptError, match="the guard Failing has failed: TypeError: 'NoneType'"):
        distgpt.train(**SIZE, out=tmp_path / "run")


def test_a_guard_says_why_it_ends_a_run(handed_in, tmp_path):
    handed_in("guards", mine="Ending")
    with pytest.raises(Interrupted, match="a file STOP is there") as ended:
        distgpt.train(**SIZE, out=tmp_path / "run")
    assert ended.value.exit_code == 143


@pytest.mark.parametrize(
    "path, said", [("gone:make", "Python finds no such module"), ("signal:make", "'make' of signal")]
)
def test_a_row_that_is_not_there_is_a_line_before_anything_is_written(monkeypatch, tmp_path, path, said):
    monkeypatch.setitem(tables._paths, "guards", {"mine": path})
    with pytest.raises(UsageError, match=f"the guard 'mine' needs .*{said}"):
        distgpt.train(**SIZE, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    monkeypatch.setitem(tables._paths, "tokenizers", {"mine": path})
    with pytest.raises(UsageError, match="'nosuch' is no kind and no file" if "gone" in path else said):
        load_tokenizer("nosuch")


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
    with pytest.raises(DataError, match="'pieces' does not cut a text into its ids"):
        encode_parts(Pieces([b"word"]), ["two words"])
