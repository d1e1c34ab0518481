"""Tables whose rows lie in components: each row is there, and imported only when it is asked for."""

import inspect
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from distgpt.adapters.adapter import ADAPTER
from distgpt.adapters.lora import adapter_layout
from distgpt.commands.train import note_unguarded
from distgpt.components import TABLES
from distgpt.core.base import tables
from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.base.tables import COMPONENTS, MissingComponent, Table, part
from distgpt.core.comm.job import Job
from distgpt.core.comm.layout import Layout
from distgpt.core.comm.resources import Grants
from distgpt.core.comm.serial import SerialComm
from distgpt.core.config import ModelConfig, RunConfig, TrainConfig, settings_of
from distgpt.core.cpu.compiling.processor import PROCESSORS, UNLISTED
from distgpt.core.cpu.kernels import as_it_is
from distgpt.core.cpu.matmul import assembled
from distgpt.core.cpu.stages import KERNELS, KINDS
from distgpt.core.data.loading import TEXTS, Corpus, DataRequest, load_corpus
from distgpt.core.data.textfile import no_remedy
from distgpt.core.data.tokenizers import (
    EXTRAS,
    TOKENIZERS,
    TokenizerKind,
    load_tokenizer,
    tokenizer_from_json,
)
from distgpt.core.generate.engine_setup import on_first, plain_kind
from distgpt.core.model.memory import FlatBuffer
from distgpt.core.model.model import Architecture, Model
from distgpt.core.ops.reference import ReferenceKernels
from distgpt.core.saved.modelfile import Base, Description, read_description, save_model
from distgpt.core.saved.tensors import write_tensors
from distgpt.core.saved.weights import PARTS, ROUNDED, SOURCES, PartKind, RoundedKind
from distgpt.core.train.assessment import METRICS
from distgpt.core.train.lines import LISTENERS, Lines
from distgpt.core.train.plan import CHECKS, refuse_unsuited
from distgpt.core.train.run import plain_seams
from distgpt.core.train.seams import MODEL_KINDS, WholeModel
from distgpt.core.train.setup import FIRST_WEIGHTS, unhelped
from distgpt.core.train.sharing import STRATEGIES, USUAL, Strategy, strategy_for
from distgpt.core.train.summary import FACTS
from distgpt.guards.attach import GUARDS, keep_nothing
from distgpt.jobs.batch.script import SYSTEMS, System
from distgpt.launch.leaving import LIBRARIES
from distgpt.rounded.loops.int8 import TILES, Int8Tile
from distgpt.rounded.rounded import quantize

EXCHANGES = Table("exchanges", "--grad-sync", {})

PACKAGE = Path(tables.__file__).parents[2]


def public(kind):
    """The names of a class that others may use."""
    return [name for name in vars(kind) if not name.startswith("_")]


def has(row, protocol):
    return all(hasattr(row, name) for name in public(protocol))


# A row of each table has these attributes or, where a row is a class, is one.
ROWS = {
    "tokenizers": (TOKENIZERS, lambda row: isinstance(row, TokenizerKind)),
    "texts": (TEXTS, lambda row: callable(row.load) and callable(row.refuse_missing)),
    "extras": (EXTRAS, lambda row: hasattr(row({"source": "", "tokens": {}, "ends": []}, 9, "here"), "ends")),
    "weights": (SOURCES, callable),
    "metrics": (METRICS, lambda row: callable(row.fields)),
    "checks": (CHECKS, lambda row: list(inspect.signature(row).parameters) == ["t", "ranks", "on_gpu"]),
    "batch systems": (SYSTEMS, lambda row: isinstance(row, System) and row.documented),
    "models": (MODEL_KINDS, lambda row: {*public(WholeModel)} <= {*public(type(row))}),
    "exchanges": (EXCHANGES, callable),
    "rounded tiles": (TILES, lambda row: issubclass(row, Int8Tile)),
    "guards": (GUARDS, callable),
    "summary": (FACTS, callable),
    "components": (COMPONENTS, lambda row: row is not None),
    "listeners": (LISTENERS, lambda row: {*public(Lines)} - {"say"} <= {*dir(row)}),
    "libraries": (LIBRARIES, lambda row: row.raised(ValueError()) is None and row.name),
    "stages": (KINDS, lambda row: callable(row.open) and callable(row.dtype_choice)),
    "kernels": (KERNELS, lambda row: list(inspect.signature(row).parameters) == ["stage", "dtype", "matmul"]),
    "processors": (PROCESSORS, lambda row: row.shape({"avx2"}) is None or row.shape({"neon"}).neon),
    "features": (UNLISTED, callable),
    "tiles": (
        assembled.TILES,
        lambda row: [*inspect.signature(row).parameters][:3] == ["shape", "operand", "out"],
    ),
    "steps": (assembled.STEPS, lambda row: "@fours" in row[0]() and row[1]),
    "packed rows": (assembled.PACKED_ROWS, lambda row: "@rows(" in row[0]() and row[1] % row[2] == 0),
    "rounded": (ROUNDED, lambda row: has(row, RoundedKind) and row.stored),
    "part files": (PARTS, lambda row: has(row, PartKind)),
    "strategies": (STRATEGIES, lambda row: issubclass(row, Strategy)),
    "first weights": (FIRST_WEIGHTS, lambda row: callable(row.learn) and row.note and row.tokens),
}


# Parts that the core has plain ones of.
MORE = {
    "helpers": unhelped,
    "kept": keep_nothing,
    "one prompt": on_first,
    "record": as_it_is,
    "remedy": no_remedy,
    "seams": plain_seams,
    "slots": plain_kind,
}
OBJECTS = {"job": Job, "grants": Grants, "layout": Layout}


def test_every_row_that_is_handed_in_is_there():
    assert TABLES.keys() - {"loops", "parts"} == ROWS.keys()  # folders, files, and plain ones
    assert {*MORE, *OBJECTS} == {*TABLES["parts"]}
    for name, plain in OBJECTS.items():
        assert isinstance(row := part(name, None), plain) and type(row) is not plain
    for name, plain in MORE.items():
        assert (
            inspect.signature(part(name, plain)).parameters.keys()
            == inspect.signature(plain).parameters.keys()
        )
    assert all((PACKAGE / folder / "__init__.py").exists() for folder in TABLES["loops"].values())
    for name, (table, fits) in ROWS.items():
        assert set(TABLES[name]) <= {*table}
        assert all(fits(row) for _, row in table.rows()) and len(list(table.rows())) == len([*table])


def test_every_component_that_settings_name_is_in_the_table():
    named = {each.component for kind in (ModelConfig, TrainConfig) for each in settings_of(kind).values()}
    named |= {name for each in settings_of(TrainConfig).values() for _, name in each.components}
    assert named - {""} <= {*COMPONENTS}


def test_a_setting_whose_component_is_missing_is_refused_in_one_line(handed_in):
    t = replace(TrainConfig(), on_bad_step="skip")
    refuse_unsuited(t, 1, on_gpu=False)
    handed_in("components", rollback="distgpt.guards.removed:BadSteps")
    with pytest.raises(MissingComponent, match=r"'rollback' needs distgpt\.guards\.removed, which"):
        refuse_unsuited(t, 1, on_gpu=False)
    refuse_unsuited(TrainConfig(), 1, on_gpu=False)


def test_a_part_that_is_missing_is_the_cores_plain_one(handed_in):
    assert part("seams", plain_seams) is not plain_seams
    handed_in("parts", seams="distgpt.guards.removed:guarded")
    assert part("seams", plain_seams) is plain_seams


def test_settings_that_ask_for_no_other_way_to_share_a_step_get_the_usual_one(handed_in):
    plain = (TrainConfig(), TrainConfig(grad_sync="chunked"))
    assert {type(strategy_for(t, 4)) for t in plain} == {STRATEGIES[USUAL]}
    assert {type(strategy_for(t, 1)) for t in plain} == {Strategy}
    handed_in("strategies", **{USUAL: "distgpt.parallel.removed:Chosen"})
    assert {type(strategy_for(t, 4)) for t in plain} == {Strategy}
    named = {"balance": "auto", "grad_sync": "sharded", "outer_every": 4, "reproducible_parts": 8}
    for setting, value in named.items():
        assert type(strategy_for(TrainConfig(**{setting: value}), 4)) is not Strategy


def test_a_batch_job_whose_end_nothing_keeps_hears_it_in_a_line(handed_in):
    said = []
    note_unguarded(said.append)
    assert not said
    handed_in("components", guards="distgpt.guards.removed:guarded")
    note_unguarded(said.append)
    assert len(said) == 1 and "will not save before its batch job ends" in said[0] and "guards" in said[0]


def test_a_plain_text_is_read_without_any_component():
    modules = {path.partition(":")[0] for rows in TABLES.values() for path in rows.values() if ":" in path}
    script = """import sys
import distgpt.core.train.assessment
from distgpt.core.comm.serial import SerialComm
from distgpt.core.config import ModelConfig, TrainConfig, settings_of
from distgpt.core.cpu.compiling.processor import PROCESSORS, UNLISTED
from distgpt.core.cpu.matmul import assembled
from distgpt.core.cpu.stages import KERNELS, KINDS
from distgpt.core.data.loading import DataRequest, load_corpus
load_corpus(SerialComm(), DataRequest("story", "byte", val="names"))
print(*sys.modules)"""
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not modules & set(loaded.stdout.split())


class Alphabet:
    """A tokenizer's row as somebody may add it: what is asked for by name, learned and read again."""

    def learn(self, argument, texts, are_documents):
        return load_tokenizer("char", argument + "".join(texts))

    def from_json(self, document, source):
        return load_tokenizer("byte")


@pytest.fixture
def handed_in(monkeypatch):
    """Hand in the rows of this file beside the others."""

    def hand_in(table, **rows):
        monkeypatch.setitem(tables._paths, table, {**TABLES[table], **rows})

    return hand_in


ALPHABET = TokenizerKind(
    "alphabet:LETTERS",
    accepts=str.islower,
    learn=Alphabet().learn,
    from_json=Alphabet().from_json,
    means=lambda argument, tokenizer: tokenizer.size > len(argument),
)


def test_a_tokenizer_is_one_file_and_one_line(handed_in, tmp_path):
    with pytest.raises(UsageError, match="no kind and no file"):
        load_tokenizer("alphabet:abc")
    handed_in("tokenizers", alphabet=f"{__name__}:ALPHABET")
    assert load_tokenizer("alphabet:abc", "d").size == 4
    with pytest.raises(UsageError, match="takes its vocabulary from a text"):
        load_tokenizer("alphabet:abc")
    saved = json.loads(load_tokenizer("byte", "").to_json()) | {"kind": "alphabet"}
    assert tokenizer_from_json(json.dumps(saved), "here").size == 256
    (tmp_path / "text.txt").write_text("cab " * 9)
    asked = DataRequest(str(tmp_path / "text.txt"), "alphabet:abc")
    assert load_corpus(SerialComm(), asked).tokenizer.decode([0, 1, 2, 3]) == " abc"


class Repeated:
    """A text's row: it has the same token always."""

    def refuse_missing(self, request):
        """Refuse nothing."""

    def load(self, comm, request, say):
        from distgpt.core.data.batches import ArrayTokens

        return Corpus(load_tokenizer("byte"), ArrayTokens(np.zeros(9, np.uint16)))


REPEATED = Repeated()


def test_a_kind_of_text_is_found_by_its_ending_or_by_a_setting(handed_in, tmp_path):
    (tmp_path / "text.same").write_text("some text")
    asked = DataRequest(str(tmp_path / "text.same"))
    assert load_corpus(SerialComm(), asked).train.read(0, 4).tolist() == [*b"some"]
    handed_in("texts", **{".same": f"{__name__}:REPEATED"})
    assert load_corpus(SerialComm(), asked).train.read(0, 4).tolist() == [0, 0, 0, 0]
    chosen = DataRequest("story", kind=".same")
    assert len(load_corpus(SerialComm(), chosen).train) == 9


def test_a_component_that_is_missing_is_named_in_one_line(handed_in, tmp_path):
    handed_in("tokenizers", bpe="distgpt.removed.bpe:BPE", hub="distgpt.texts.no_such_file:HUB")
    saved = json.dumps(json.loads(load_tokenizer("byte", "").to_json()) | {"kind": "bpe"})
    for wrong in (lambda: tokenizer_from_json(saved, "x"), lambda: load_tokenizer("bpe:300", "a text")):
        with pytest.raises(UsageError, match=r"'bpe' needs distgpt\.removed\.bpe, which is not installed"):
            wrong()
    with pytest.raises(UsageError, match="no kind and no file"):  # although some rows cannot be asked
        load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="unknown kind 'none'"):
        tokenizer_from_json(saved.replace('"bpe"', '"none"'), "x")


def test_a_file_of_a_missing_component_is_refused_in_one_line(handed_in, tmp_path):
    config = ModelConfig(vocab_size=9, seq_len=4, n_layer=1, n_head=1, n_embd=4)
    model = Model(Architecture(config), ReferenceKernels("float32"))
    files = {name: tmp_path / name for name in ("whole", "rounded", "part")}
    about = Description(RunConfig(config, TrainConfig(lora_rank=2)), None)
    save_model(files["whole"], model, about)
    quantize(files["whole"], files["rounded"])
    layout = adapter_layout(about.run)
    part = replace(about, part=ADAPTER, base=Base(str(files["whole"]), "0"))
    write_tensors(files["part"], FlatBuffer(layout, model.kernels.zeros), part.to_metadata())
    assert read_description(files["rounded"]).rounded == "int8" and read_description(files["part"]) == part
    handed_in("rounded", int8="distgpt.removed:INT8", int4="distgpt.removed:INT4")
    handed_in("part files", **{ADAPTER: "distgpt.removed:FILES"})
    for name, row in {"rounded": "int8", "part": ADAPTER}.items():
        with pytest.raises(UsageError, match=rf"'{row}' needs distgpt\.removed, which is not installed"):
            read_description(files[name])
    assert read_description(files["whole"]) == about


def test_what_a_component_lacks_itself_is_not_taken_for_its_absence(monkeypatch, tmp_path):
    (tmp_path / "broken_row.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(tables._paths, "here", {"row": "broken_row:ROW"})
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        Table("here", "a row", {})["row"]
