"""Tables whose rows lie in components: each row is there, and imported only when it is asked for."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from distgpt.components import TABLES
from distgpt.core.base import tables
from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.base.tables import Table
from distgpt.core.comm.serial import SerialComm
from distgpt.core.data.loading import TEXTS, Corpus, DataRequest, load_corpus
from distgpt.core.data.tokenizers import (
    EXTRAS,
    TOKENIZERS,
    TokenizerKind,
    build_tokenizer,
    load_tokenizer,
    tokenizer_from_json,
)
from distgpt.core.saved.named import WEIGHTS
from distgpt.core.train.assessment import METRICS
from distgpt.core.train.compatibility import CHECKS
from distgpt.core.train.restore import FIRST_WEIGHTS
from distgpt.core.train.seams import MODEL_KINDS, WholeModel

PACKAGE = Path(tables.__file__).parents[2]


def public(kind):
    """The names of a class that others may use."""
    return [name for name in vars(kind) if not name.startswith("_")]


# A row of each table has these attributes or, where a row is a class, is one.
ROWS = {
    "tokenizers": (TOKENIZERS, lambda row: isinstance(row, TokenizerKind)),
    "texts": (TEXTS, lambda row: callable(row.load) and callable(row.refuse_missing)),
    "extras": (EXTRAS, lambda row: hasattr(row({"source": "", "tokens": {}, "ends": []}, 9, "here"), "ends")),
    "weights": (WEIGHTS, callable),
    "metrics": (METRICS, lambda row: callable(row.fields)),
    "checks": (CHECKS, lambda row: list(inspect.signature(row).parameters) == ["t", "ranks", "on_gpu"]),
    "models": (MODEL_KINDS, lambda row: {*public(WholeModel)} <= {*public(type(row))}),
    "first weights": (FIRST_WEIGHTS, lambda row: callable(row.learn) and row.note and row.tokens),
}


def test_every_row_that_is_handed_in_is_there():
    assert TABLES.keys() == ROWS.keys() | {"loops"}
    assert all((PACKAGE / folder / "__init__.py").exists() for folder in TABLES["loops"].values())
    for name, (table, fits) in ROWS.items():
        assert set(TABLES[name]) <= {*table}
        assert all(fits(row) for _, row in table.rows()) and len(list(table.rows())) == len([*table])


def test_a_plain_text_is_read_without_any_component():
    modules = {path.partition(":")[0] for rows in TABLES.values() for path in rows.values()}
    script = """import sys
import distgpt.core.train.assessment
from distgpt.core.comm.serial import SerialComm
from distgpt.core.data.loading import DataRequest, load_corpus
load_corpus(SerialComm(), DataRequest("story", "byte", val="names"))
print(*sys.modules)"""
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not modules & set(loaded.stdout.split())


class Alphabet:
    """A tokenizer's row as somebody may add it: what is asked for by name, learned and read again."""

    def learn(self, argument, texts, are_documents):
        return build_tokenizer("char", argument + "".join(texts))

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
    assert build_tokenizer("alphabet:abc", "d").size == 4
    with pytest.raises(UsageError, match="takes its vocabulary from a text"):
        load_tokenizer("alphabet:abc")
    saved = json.loads(build_tokenizer("byte", "").to_json()) | {"kind": "alphabet"}
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

        return Corpus(load_tokenizer("byte"), {"train": ArrayTokens(np.zeros(9, np.uint16))})


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
    saved = json.dumps(json.loads(build_tokenizer("byte", "").to_json()) | {"kind": "bpe"})
    for wrong in (lambda: tokenizer_from_json(saved, "x"), lambda: build_tokenizer("bpe:300", "a text")):
        with pytest.raises(UsageError, match=r"'bpe' needs distgpt\.removed\.bpe, which is not installed"):
            wrong()
    with pytest.raises(UsageError, match="no kind and no file"):  # although some rows cannot be asked
        load_tokenizer(str(tmp_path / "nowhere"))
    with pytest.raises(DataError, match="unknown kind 'none'"):
        tokenizer_from_json(saved.replace('"bpe"', '"none"'), "x")


def test_what_a_component_lacks_itself_is_not_taken_for_its_absence(monkeypatch, tmp_path):
    (tmp_path / "broken_row.py").write_text("import no_such_library")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(tables._paths, "here", {"row": "broken_row:ROW"})
    with pytest.raises(ModuleNotFoundError, match="no_such_library"):
        Table("here", "a row", {})["row"]
