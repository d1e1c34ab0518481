"""BPE from the files of others: Hugging Face's, GPT-2's, and the hub; what is of another kind is refused."""

import json
import sys
import types

import pytest
from test_bpe import GPT2, TEXT, gpt2, needs_gpt2, small
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from distgpt.data.tokenizers.naming import GPT2_FINGERPRINT, fingerprint, load_tokenizer
from distgpt.errors import DataError, UsageError


def hugging_face(special="<|endoftext|>"):
    """What `tokenizers` itself writes for the small BPE, as a document."""
    entries = small().vocabulary[:-1]
    library = Tokenizer(models.BPE({entry: i for i, entry in enumerate(entries)}, list(small().merges)))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if special:
        library.add_special_tokens([AddedToken(special, special=True)])
    return json.loads(library.to_str())


def loaded(path, document):
    path.write_text(json.dumps(document), encoding="utf-8")
    return load_tokenizer(str(path))


def write_gpt2_style(folder, merges=None, **changed):
    vocab = {entry: i for i, entry in enumerate(small().vocabulary)} | changed
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    lines = ["#version: 0.2", *(f"{a} {b}" for a, b in small().merges)] if merges is None else merges
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def test_hugging_face_s_file_gives_the_same_tokenizer(tmp_path):
    assert loaded(tmp_path / "any.json", hugging_face()).to_json() == small().to_json()
    loaded(tmp_path / "tokenizer.json", hugging_face())
    assert load_tokenizer(str(tmp_path)).to_json() == small().to_json()


def test_merges_written_as_strings_are_read_too(tmp_path):
    document = hugging_face()
    document["model"]["merges"] = [" ".join(pair) for pair in document["model"]["merges"]]
    assert loaded(tmp_path / "old.json", document).to_json() == small().to_json()


@pytest.mark.parametrize(("special", "separator"), [("", None), ("<end of text>", -1), ("ende\u0301", -1)])
def test_one_special_token_is_the_separator_whatever_it_is_called(tmp_path, special, separator):
    tokenizer = loaded(tmp_path / "tokenizer.json", hugging_face(special))
    assert tokenizer.separator == (separator and tokenizer.size - 1)
    if special:
        assert tokenizer.decode([tokenizer.separator]) == special
    assert tokenizer.encode(TEXT).tolist() == small().encode(TEXT).tolist()


@pytest.mark.parametrize("name", ["", "vocab.json"])
def test_vocab_and_merges_give_the_same_tokenizer(tmp_path, name):
    write_gpt2_style(tmp_path)
    assert load_tokenizer(str(tmp_path / name)).to_json() == small().to_json()


@needs_gpt2
def test_gpt2_in_hugging_face_s_form_is_recognised(tmp_path):
    entries = {entry: i for i, entry in enumerate(gpt2().vocabulary)}
    library = Tokenizer(models.BPE(entries, list(gpt2().merges)))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.add_special_tokens(["<|endoftext|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    assert fingerprint(load_tokenizer(str(tmp_path))) == GPT2_FINGERPRINT


def refused(document, message, tmp_path, name="tokenizer.json"):
    with pytest.raises(DataError, match=message) as refusal:
        loaded(tmp_path / name, document)
    assert name in str(refusal.value)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 350


def split_otherwise():
    split = pre_tokenizers.Split(Regex(r"\p{N}{1,3}"), "isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("normalizer", normalizers.NFC(), "it normalizes text first"),
        ("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True), "puts a space before the text"),
        ("pre_tokenizer", pre_tokenizers.Metaspace(), "pre-tokenizer is 'Metaspace'"),
        ("pre_tokenizer", split_otherwise(), "pre-tokenizer is 'Sequence'"),
        (
            "pre_tokenizer",
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            "does not split like GPT-2's",
        ),
    ],
)
def test_another_way_to_prepare_text_is_refused_by_name(tmp_path, part, value, message):
    library = Tokenizer.from_str(json.dumps(hugging_face()))
    setattr(library, part, value)
    refused(json.loads(library.to_str()), f"is not byte-level BPE as in GPT-2.*{message}", tmp_path)


def test_another_model_a_damaged_one_or_senseless_added_tokens_are_refused(tmp_path):
    for change, message in (
        ({"type": "WordPiece"}, "its model is 'WordPiece'"),
        ({"end_of_word_suffix": "</w>"}, "sets end_of_word_suffix"),
        ({"ignore_merges": True}, "sets ignore_merges"),
        ({"vocab": None}, "no vocabulary or no merges"),
        ({"vocab": [["a", 1]]}, "no vocabulary or no merges"),
        ({"merges": None}, "no vocabulary or no merges"),
        ({"merges": ["a b c"]}, r"\['a', 'b', 'c'\] is not a pair"),
        ({"vocab": {"a": 0, "b": 2}}, "'b' has the id 2"),
        ({"vocab": {"a": 0, "b": 0}}, "has the id 0"),
        ({"vocab": {"a": 2**40}}, "has the id 1099511627776"),
        ({"vocab": {"a": "0"}}, "has the id '0'"),
    ):
        document = hugging_face("")
        document["model"] |= change
        refused(document, message, tmp_path)
    for added, message in (
        ({"id": 399, "content": "    ", "special": False}, "cuts '    ' out of the text first"),
        ({"id": 400, "content": "<|endoftext|>", "special": True}, "has the id 400"),
        ({"id": 3, "content": "<|endoftext|>", "special": True}, "has the id 3"),
        ({"id": 399, "content": "\ud800", "special": True}, "no content or no id"),
        ({"id": 399}, "no content or no id"),
        ("<|endoftext|>", "no content or no id"),
    ):
        refused(hugging_face("") | {"added_tokens": [added]}, message, tmp_path)


def test_damaged_vocab_and_merges_are_refused(tmp_path):
    write_gpt2_style(tmp_path, merges=["a b c"])
    with pytest.raises(DataError, match=r"merges\.txt: line 1 is not two tokens .*'a b c'"):
        load_tokenizer(str(tmp_path))
    write_gpt2_style(tmp_path, hole=1000)
    with pytest.raises(DataError, match="'hole' has the id 1000"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "merges.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"merges\.txt' cannot be read"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(DataError, match="vocabulary without its merges"):
        load_tokenizer(str(tmp_path / "vocab.json"))
    with pytest.raises(DataError, match="holds no tokenizer"):
        load_tokenizer(str(tmp_path))


class Hub(types.ModuleType):
    """huggingface_hub's functions with a cache in one folder and an internet in another, or none."""

    class EntryNotFoundError(Exception):
        pass

    class LocalEntryNotFoundError(FileNotFoundError, EntryNotFoundError):
        pass

    def __init__(self, cache, internet, failure=ConnectionError):
        super().__init__("huggingface_hub")
        self.errors, self.failure, self.asked = Hub, failure, []
        self._cache, self._internet = cache, internet

    def hf_hub_url(self, repository, name):
        return f"{repository}/{name}"

    def get_hf_file_metadata(self, url, timeout):
        self.asked.append(url)
        if self._internet is None:
            raise self.failure("no route to host")
        if not (self._internet / url.rsplit("/")[-1]).exists():
            raise Hub.EntryNotFoundError("404")

    def hf_hub_download(self, repository, name, local_files_only):
        if not (self._cache / name).exists():
            if local_files_only:
                raise Hub.LocalEntryNotFoundError("not in the cache")
            (self._cache / name).write_bytes((self._internet / name).read_bytes())
        return str(self._cache / name)


@pytest.mark.parametrize("form", ["tokenizer.json", "vocab.json and merges.txt"])
def test_the_hub_is_asked_once_and_its_cache_from_then_on(tmp_path, monkeypatch, form):
    cache, internet = tmp_path / "cache", tmp_path / "internet"
    cache.mkdir()
    internet.mkdir()
    if form == "tokenizer.json":
        (internet / form).write_text(json.dumps(hugging_face()), encoding="utf-8")
    else:
        write_gpt2_style(internet)
    hub = Hub(cache, internet)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    assert load_tokenizer("hub:some/model").to_json() == small().to_json()
    assert hub.asked[0] == "some/model/tokenizer.json"
    hub.asked.clear()
    assert load_tokenizer("hub:some/model").to_json() == small().to_json()
    assert hub.asked == []


class ClientError(Exception):
    """As HTTP clients have them, which are not all kinds of OSError."""


@pytest.mark.parametrize("failure", [ConnectionError, ClientError])
@pytest.mark.parametrize(("word", "name"), [("gpt2", "openai-community/gpt2"), ("hub:a/b", "a/b")])
def test_without_a_network_the_way_out_is_named(tmp_path, monkeypatch, word, name, failure):
    hub = Hub(tmp_path, None, failure)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    with pytest.raises(
        DataError, match=f"{name} .*no route to host.*directory with its vocab.json"
    ) as refusal:
        load_tokenizer(word)
    assert "\n" not in str(refusal.value)
    assert len(hub.asked) == 1


def test_without_the_hub_s_package_its_name_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UsageError, match=r"pip install huggingface_hub.*vocab.json"):
        load_tokenizer("gpt2")


@needs_gpt2
def test_what_the_hub_gives_for_gpt2_is_gpt2(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub(GPT2, None))
    assert fingerprint(load_tokenizer("gpt2")) == GPT2_FINGERPRINT
