"""tokenizer.json of Llama 3, Qwen, SmolLM2, TinyLlama, Mistral: the library's ids, special tokens apart."""

import json

import pytest
from complaints import complains
from distgpt.core.data.tokenizers import ChatTemplate, fingerprint, load_tokenizer, tokenizer_from_json
from distgpt.corpora.tokenizers.bpe import symbols
from families import FAMILIES, document, write_family
from tokenizers import Tokenizer
from tokenizing import STORY, TEXT

PLAIN = (STORY[:2000], "1234567 in 2026", " two  blanks ", "naïve e\u0301 中日 🙂\n\n\tx", "", " ")


@pytest.fixture(params=FAMILIES)
def both(request, tmp_path):
    """Our tokenizer and the library's own."""
    return write_family(tmp_path / "model", request.param), Tokenizer.from_str(document(request.param))


def test_a_text_has_the_ids_and_the_text_that_the_library_gives_it(both):
    ours, library = both
    for text in PLAIN:
        ids = ours.encode(text).tolist()
        assert ids == library.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids) == library.decode(ids, skip_special_tokens=False), text
        streamer = ours.streamer()
        assert "".join(map(streamer.feed, ids)) + streamer.flush() == ours.decode(ids)


def test_no_text_spells_a_special_token(both):
    ours, library = both
    for spelled, token in ours.specials.items():
        assert token == library.token_to_id(spelled)
        found = ours.encode(f"a {spelled} b").tolist()
        assert token not in found and spelled in ours.decode(found)
        assert token in library.encode(f"a {spelled} b").ids
    assert len(ours.specials) >= 3


def test_parts_have_the_ids_of_the_whole_and_a_prompt_begins_as_the_post_processor_says(both):
    """The library's own way finds special tokens in the text, and what follows one is not a beginning."""
    ours, library = both
    assert ours.encode_prompt("The lamp") == library.encode("The lamp").ids
    spelled, token = list(ours.specials.items())[-1]
    ids, ends = ours.encode_parts(["lamp 12", token, token, "é the lamp", "s"])
    assert ids.tolist() == library.encode(f"lamp 12{spelled}{spelled}é the lamps", add_special_tokens=False).ids
    assert ends[-1] == len(f"lamp 12{spelled}{spelled}é the lamps") and (ends[1:] >= ends[:-1]).all()
    first = ids.tolist().index(token)
    assert ends[first - 1] == 7 and ends[first] == 7 + len(spelled) and ends[first + 1] == 7 + 2 * len(spelled)


def test_what_is_saved_comes_back_with_its_chat_template(both):
    ours, _ = both
    chat = ChatTemplate("{{ bos_token }}", {"bos_token": "<s>"}, (1,))
    back = tokenizer_from_json(ours.with_chat(chat).to_json(), "a file")
    assert back.to_json() == ours.with_chat(chat).to_json() and back.chat == chat
    assert back.encode(TEXT).tolist() == ours.encode(TEXT).tolist()
    assert fingerprint(back) == fingerprint(ours)


def test_the_files_beside_name_template_and_ends(tmp_path):
    folder = tmp_path / "model"
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    special = {"content": "<|im_end|>", "special": True}
    for template in (named, "yes"):
        found = write_family(folder, "qwen", chat_template=template, eos_token=special)
        end = found.specials["<|im_end|>"]
        assert found.chat == ChatTemplate("yes", {"eos_token": "<|im_end|>"}, (end,))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, end]}))
    (folder / "chat_template.jinja").write_text("newer")
    found = load_tokenizer(str(folder))
    assert found.chat.source == "newer" and found.chat.ends == (3, end)
    assert found.ends == (found.separator, 3, end)
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with complains("not valid UTF-8"):
        load_tokenizer(str(folder))


def test_a_document_that_cannot_encode_every_text_or_is_damaged_is_refused(tmp_path):
    llama = json.loads(document("llama3"))
    sentences = json.loads(document("tinyllama"))
    path = tmp_path / "tokenizer.json"
    for change, message in (
        (llama | {"decoder": None}, "its decoder is missing"),
        (llama | {"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}}, "decoder is WordPiece"),
        (sentences | {"model": sentences["model"] | {"byte_fallback": False}}, "no tokens for single bytes"),
        (llama | {"model": llama["model"] | {"vocab": {}}}, "its model, 'BPE', has no vocabulary"),
        (llama | {"model": llama["model"] | {"vocab": {"a": -1}}}, "'a' has the id -1"),
        (llama | {"model": llama["model"] | {"merges": [["zz", "qq"]]}}, "the library tokenizers refuses it"),
        (llama | {"pre_tokenizer": {"type": "Magic"}}, "the library tokenizers refuses it"),
        (llama | {"added_tokens": [{"id": 3}]}, "has no content"),
        (llama | {"added_tokens": llama["added_tokens"][:1] * 2}, "is there twice"),
        # Over this prefix the library ends the process.
        (llama | {"model": llama["model"] | {"continuing_subword_prefix": "é"}}, "continuing_subword_prefix"),
        (llama | {"added_tokens": [{"id": 1 << 40, "content": "<x>", "special": True}]}, "has the id"),
    ):
        path.write_text(json.dumps(change))
        with complains(message):
            load_tokenizer(str(path))


def test_special_tokens_do_not_fall_on_other_entries(tmp_path):
    """The library would number tokens that it does not know by their count: here as the last entries."""
    found = json.loads(document("smollm2"))
    vocab = found["model"]["vocab"]
    for token in found["added_tokens"]:
        vocab.pop(token["content"], None)
    last = max(vocab, key=vocab.get)
    text = last.replace("Ġ", " ")
    for token in found["added_tokens"]:
        token["id"] += 1
    vocab[last] = len(vocab)
    (tmp_path / "tokenizer.json").write_text(json.dumps(found))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode(text).tolist() == [vocab[last]]
    specials = list(tokenizer.specials.values())
    assert tokenizer.encode_parts([text, *specials])[0].tolist() == [vocab[last], *specials]


def test_a_character_whose_bytes_the_vocabulary_lacks_is_named(tmp_path):
    """The library would leave it out."""
    lacking = json.loads(document("smollm2"))
    vocab = {text: i for text, i in lacking["model"]["vocab"].items() if text != symbols()[0xAD]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(lacking | {"model": lacking["model"] | {"vocab": vocab}}))
    found = load_tokenizer(str(tmp_path))
    assert found.decode(found.encode("é")) == "é"
    with complains("'中' at position 2 cannot be encoded"):
        found.encode("a 中")
