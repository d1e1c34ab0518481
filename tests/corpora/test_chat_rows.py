"""Rows of chats to learn from: every shape that people have, what is learned of it, and what is refused."""

import gzip
import json

import numpy as np
import pytest
from chattemplates import settings
from complaints import complains
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.corpora.chats.examples import read_examples
from distgpt.corpora.chats.format import ChatFormat
from families import FAMILIES, write_family
from tokenizing import small

QUESTION, ANSWER = "Where is the lamp?", "In the 12th harbour, naïve 中."
TURN = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]


@pytest.fixture
def plain():
    return ChatFormat(small())


def rows(path, *found):
    path.write_text("\n".join(each if isinstance(each, str) else json.dumps(each) for each in found))
    return path


def examples(path, chat):
    return list(read_examples(path, chat))


@pytest.mark.ci
@pytest.mark.parametrize("family", FAMILIES)
def test_all_shapes_of_a_chat_give_the_same_tokens(family, tmp_path):
    chat = ChatFormat(write_family(tmp_path / "model", family, **settings(family)))
    with_input = {"instruction": "Where is", "input": "the lamp?", "output": ANSWER}
    path = rows(
        tmp_path / "rows.jsonl",
        {"messages": TURN, "source": "made up"},
        "",
        {"prompt": QUESTION, "completion": ANSWER},
        {"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]},
        {"instruction": QUESTION, "input": "", "output": ANSWER},
        {"instruction": QUESTION, "output": ANSWER},
        with_input,
    )
    first, *others, last = examples(path, chat)
    assert first.ids.dtype == np.uint16 and first.learned.dtype == np.uint8
    for other in others:
        assert np.array_equal(other.ids, first.ids) and np.array_equal(other.learned, first.learned)
    shown = chat.tokenizer.decode(last.ids)
    assert "Where is\n\nthe lamp?" in shown
    learned = chat.tokenizer.decode(last.ids[last.learned == 1]).strip()
    assert learned == ANSWER + settings(family)["eos_token"]
    assert last.ids[last.learned == 1][-1] in chat.ends


def test_of_several_answers_each_is_learned_with_its_end(plain, tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, *TURN, *TURN]
    ((ids, learned),) = examples(rows(tmp_path / "r", {"messages": messages}), plain)
    assert plain.tokenizer.decode(ids[learned == 1]) == f"{ANSWER}<|endoftext|>" * 2
    assert plain.tokenizer.decode(ids).startswith(f"Be brief.\n\nUser:\n{QUESTION}\n\nAssistant:\n")
    byte = ChatFormat(load_tokenizer("byte", ""))
    ((ids, learned),) = examples(rows(tmp_path / "r", {"messages": messages}), byte)
    assert bytes(ids[learned == 1].tolist()).decode() == f"{ANSWER}\n\nUser:\n" * 2


def test_a_plain_text_is_learned_whole(plain, tmp_path):
    ((ids, learned),) = examples(rows(tmp_path / "r", {"text": ANSWER}), plain)
    assert plain.tokenizer.decode(ids) == f"{ANSWER}<|endoftext|>" and learned.all()
    llama = ChatFormat(write_family(tmp_path / "model", "llama3", **settings("llama3")))
    ((ids, learned),) = examples(rows(tmp_path / "r", {"text": ANSWER}), llama)
    assert llama.tokenizer.decode(ids) == f"<|begin_of_text|>{ANSWER}<|eot_id|>"
    assert learned.tolist() == [0] + [1] * (len(ids) - 1)


NO_ROWS = (
    ("{", "Expecting property name"),
    ("The lamp was lit.", "not JSON, such as ", "use distgpt train"),
    ("[1]", "is not a JSON object"),
    ({"question": "a"}, "it has 'question', and not \"messages\""),
    ({}, "it has nothing"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "message 1: the role 'robot' is unknown"),
    ({"messages": TURN[:1]}, "no answer"),
    ({"conversations": [{"from": "bing", "value": "a"}]}, "message 1: the role 'bing' is unknown"),
    ({"conversations": [3]}, "message 1 is no object"),
    ({"conversations": [{"value": "a"}]}, "message 1 is no object with a role"),
    ({"messages": []}, "not empty"),
    ({"messages": "a"}, "must be a list"),
    ({"prompt": "a", "completion": " "}, "an answer is empty"),
    ({"prompt": ["a"], "completion": "b"}, "'prompt' is no text"),
    ({"instruction": "a", "input": 3, "output": "b"}, "'input' is no text"),
    ({"text": "  "}, "the text is empty"),
    ('{"text": "\\ud800"}', "UTF-8"),
)


@pytest.mark.parametrize(("bad", "words"), [(bad, words) for bad, *words in NO_ROWS])
def test_a_row_that_is_none_is_named_by_its_line(plain, tmp_path, bad, words):
    with complains("rows.jsonl, line 2: ", *words):
        examples(rows(tmp_path / "rows.jsonl", {"messages": TURN}, bad), plain)


def test_folders_and_compressed_files_are_read_and_others_refused(plain, tmp_path):
    def refused(path, *words):
        with complains(*words):
            examples(path, plain)

    row = json.dumps({"messages": TURN}).encode()
    refused(tmp_path, "holds no file")
    (tmp_path / "a.txt").write_text("A text.")
    refused(tmp_path, "holds no chats, which are lines of JSON")
    (tmp_path / "a.txt").unlink()
    (tmp_path / "a.jsonl").write_bytes(row + b"\n" + row)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(row))
    assert len(examples(tmp_path, plain)) == 3
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(row)[:-9])
    refused(tmp_path, "damaged")
    for content, *words in ((b"", "holds no rows"), (b"\n \n", "holds no rows"), (b"\x80\x81\n", "line 1: ", "UTF-8")):
        (tmp_path / "f").write_bytes(content)
        refused(tmp_path / "f", *words)
    refused(tmp_path / "missing", "no readable file")
