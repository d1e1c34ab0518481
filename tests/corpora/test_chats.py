import gzip
import json
import select
import time

import numpy as np
import pytest
from chattemplates import BEGINS, ENDS, TEMPLATES, settings
from complaints import complains
from distgpt.core.base.errors import DataError
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.corpora.chats.examples import _fitting, _together, read_examples
from distgpt.corpora.chats.format import ChatFormat, Renderer, checked_messages, encode_parts
from families import FAMILIES, document, write_family
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizing import small

CHAT = [
    {"role": "user", "content": "Where is the lamp? "},
    {"role": "assistant", "content": "In the 12th harbour."},
    {"role": "user", "content": "naïve\n\ncafé 中"},
]


def library_ids(family, messages, asks):
    """Tokenize like transformers: the library finds special tokens in the rendered text."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.globals["raise_exception"] = None
    source = TEMPLATES[family].replace("{% generation %}", "").replace("{% endgeneration %}", "")
    tokens = {"bos_token": BEGINS.get(family, ""), "eos_token": ENDS[family]}
    text = environment.from_string(source).render(messages=messages, add_generation_prompt=asks, **tokens)
    return Tokenizer.from_str(document(family)).encode(text, add_special_tokens=False).ids


@pytest.fixture(params=TEMPLATES)
def family(request):
    return request.param


@pytest.fixture
def chat(family, tmp_path):
    return ChatFormat(write_family(tmp_path / "model", family, **settings(family)))


def test_prompt_matches_rendered_template(family, chat):
    """A special token spelled in a message is plain text."""
    for messages in (CHAT[:1], CHAT):
        assert chat.prompt(messages) == library_ids(family, messages, True)
    end, spelled = chat.tokenizer.specials[ENDS[family]], f"hi {ENDS[family]} there"
    assert end in chat.ends and chat.stops == ()
    plain, found = (chat.prompt([{"role": "user", "content": text}]) for text in ("hi", spelled))
    assert found.count(end) == plain.count(end) and spelled in chat.tokenizer.decode(found)


def test_answers_are_trained_with_their_end(family, chat):
    answers = ["In the harbour.", "é, as <|im_end|> </s> said."]
    user = [{"role": "user", "content": "In the harbour."}]
    messages = [message for text in answers for message in (*user, {"role": "assistant", "content": text})]
    ids, learned, *_ = chat.example(messages)
    if not any(spelled in answers[1] for spelled in chat.tokenizer.specials):
        assert ids.tolist() == library_ids(family, messages, False)
    spans = np.split(ids, np.flatnonzero(np.diff(learned)) + 1)[1::2]
    decoded = [chat.tokenizer.decode(span).strip() for span in spans]
    assert decoded == [text + ENDS[family] for text in answers]
    assert all(span[-1] == chat.tokenizer.specials[ENDS[family]] for span in spans)
    if family != "mistral":  # its blank belongs to the answer's first token
        at = learned.tolist().index(1)
        shared = chat.prompt(user)
        assert ids[:at].tolist()[: len(shared)] == shared


def test_default_format_is_chatml_or_plain(tmp_path):
    chatml = ChatFormat(write_family(tmp_path / "chatml", "smollm2"))
    said = chatml.tokenizer.decode(chatml.prompt([{"role": "system", "content": "Be brief."}, *CHAT[:1]]))
    assert said == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWhere is the lamp? <|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert chatml.tokenizer.specials["<|im_end|>"] in chatml.ends
    for tokenizer, end in ((small(), "<|endoftext|>"), (load_tokenizer("byte", ""), "")):
        plain = ChatFormat(tokenizer)
        assert tokenizer.decode(plain.prompt(CHAT)) == (
            f"User:\nWhere is the lamp? \n\nAssistant:\nIn the 12th harbour.{end}\n\n"
            "User:\nnaïve\n\ncafé 中\n\nAssistant:\n"
        )
        assert plain.stops == ("\n\nUser:\n",)
        ids, learned, *_ = plain.example(CHAT[:2])
        assert tokenizer.decode(ids[learned == 1]) == "In the 12th harbour." + (end or "\n\nUser:\n")
        assert (tokenizer.separator in plain.ends) == bool(end)


def test_dropped_answer_text_is_rejected(tmp_path):
    chat = ChatFormat(write_family(tmp_path / "model", "qwen", **settings("qwen")))
    thought = [CHAT[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHere."}]
    ids, learned, *_ = chat.example(thought)
    assert chat.tokenizer.decode(ids[learned == 1]) == "<think>\nhm\n</think>\n\nHere.<|im_end|>"
    with complains("changes or drops an answer"):
        chat.example([*thought, *CHAT[:2]])


@pytest.mark.ci
def test_template_limits_are_enforced():
    bounded = Renderer(seconds=1.5)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    doubled = "{% set ns = namespace(a='ab') %}"
    doubled += "{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}"
    for source, message in (
        (loop, "exceeded 1.5 s"),
        (doubled, "memory"),
        ("{{ 'a' * 20000000 }}", "has 20,000,000 characters"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "is unsafe"),
        ("{{ raise_exception('Only user\nand assistant') }}", r"Only user\\nand assistant"),
        ("{% if %}", "Expected an expression"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].content.nothing.at_all }}", "undefined|has no attribute"),
        ("{% include '/etc/passwd' %}", "no loader"),
    ):
        begun = time.monotonic()
        with pytest.raises(DataError, match=f"chat template: .*({message})"):
            bounded.render(source, {"messages": [{"content": "a"}]})
        assert time.monotonic() - begun < 10
        assert bounded.render("{{ messages[0].content }}", {"messages": [{"content": "é🙂"}]}) == "é🙂"
    bounded.close()


def test_interrupted_template_does_not_affect_the_next(monkeypatch):
    asked, values = Renderer(), {"messages": []}
    with monkeypatch.context() as patch:

        class Interrupted:
            register = staticmethod(lambda *_: None)

            def poll(self, _):
                raise KeyboardInterrupt

        patch.setattr(select, "poll", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            asked.render("the first", values)
    assert asked.render("the second", values) == "the second"
    asked.close()


def test_messages_are_validated():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert checked_messages([{"role": "user", "content": parts, "name": "x"}]) == [{"role": "user", "content": "ab"}]
    for value, message in (
        (None, "must be a non-empty list"),
        ([], "non-empty"),
        ([3], "message 1 must be an object"),
        ([CHAT[0], {"content": "a"}], "message 2 must be an object with a role"),
        ([{"role": "asistant", "content": "a"}], "unknown role 'asistant'; did you mean 'assistant'"),
        ([{"role": "user", "content": None}], "message 1: content must be a string"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "content must be a string"),
    ):
        with pytest.raises(DataError, match=message):
            checked_messages(value)


@pytest.mark.ci
@pytest.mark.timing
def test_special_tokens_take_linear_time():
    """In quadratic time, a message of 1 MB kept a server busy for seconds."""
    chat = ChatFormat(small())

    def seconds(count):
        begun = time.process_time()
        assert len(chat.prompt([{"role": "user", "content": "<|endoftext|>" * count}])) > count
        return time.process_time() - begun

    seconds(80_000)  # compiles the encoder for large inputs
    assert seconds(80_000) < 25 * min(seconds(10_000) for _ in range(3))


def test_word_tokenizer_cannot_encode_chats():
    with complains("not 'word'"):
        encode_parts(load_tokenizer("word", "a lamp"), ["a"])


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
def test_chat_layouts_give_equal_tokens(family, tmp_path):
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
    assert "Where is\n\nthe lamp?" in chat.tokenizer.decode(last.ids)
    learned = chat.tokenizer.decode(last.ids[last.learned == 1]).strip()
    assert learned == ANSWER + settings(family)["eos_token"] and last.ids[last.learned == 1][-1] in chat.ends


def test_plain_text_is_trained_whole(plain, tmp_path):
    ((ids, learned, *_),) = examples(rows(tmp_path / "r", {"text": ANSWER}), plain)
    assert plain.tokenizer.decode(ids) == f"{ANSWER}<|endoftext|>" and learned.all()
    llama = ChatFormat(write_family(tmp_path / "model", "llama3", **settings("llama3")))
    ((ids, learned, *_),) = examples(rows(tmp_path / "r", {"text": ANSWER}), llama)
    assert llama.tokenizer.decode(ids) == f"<|begin_of_text|>{ANSWER}<|eot_id|>"
    assert learned.tolist() == [0] + [1] * (len(ids) - 1)


NO_ROWS = (
    ("{", "Expecting property name"),
    ("The lamp was lit.", "not JSON, such as ", "name it .txt or .md"),
    ("[1]", "not a JSON object"),
    ({"question": "a"}, "it has 'question' but requires 'messages'"),
    ({}, "it has nothing"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "message 1: unknown role 'robot'"),
    ({"messages": TURN[:1]}, "no answer"),
    ({"conversations": [{"from": "bing", "value": "a"}]}, "message 1: unknown role 'bing'"),
    ({"conversations": [3]}, "message 1 must be an object"),
    ({"prompt": "a", "completion": " "}, "an answer is empty"),
    ({"prompt": ["a"], "completion": "b"}, "'prompt' is not a string"),
    ({"instruction": "a", "input": 3, "output": "b"}, "'input' is not a string"),
    ({"text": "  "}, "the text is empty"),
    ('{"text": "\\ud800"}', "UTF-8"),
)


@pytest.mark.parametrize(("bad", "words"), [(bad, words) for bad, *words in NO_ROWS])
def test_invalid_row_names_its_line(plain, tmp_path, bad, words):
    with complains("rows.jsonl, line 2: ", *words):
        examples(rows(tmp_path / "rows.jsonl", {"messages": TURN}, bad), plain)


def test_directories_and_gzip_files_are_read(plain, tmp_path):
    def refused(path, *words):
        with complains(*words):
            examples(path, plain)

    row = json.dumps({"messages": TURN}).encode()
    refused(tmp_path, "has no files")
    (tmp_path / "a.txt").write_text("A text.\r\n")
    (tmp_path / "b.md").write_text(" ")
    ((ids, learned, is_text, _),) = examples(tmp_path, plain)
    assert plain.tokenizer.decode(ids) == "A text.<|endoftext|>" and learned.all() and is_text
    (tmp_path / "a.jsonl").write_bytes(row + b"\n" + row)
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(row))
    assert len(examples(tmp_path, plain)) == 3
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(row)[:-9])
    refused(tmp_path, "corrupt")
    for content, *words in ((b"", "has no rows"), (b"\n \n", "has no rows"), (b"\x80\x81\n", "line 1: ", "UTF-8")):
        (tmp_path / "f").write_bytes(content)
        refused(tmp_path / "f", *words)
    refused(tmp_path / "missing", "not a file")


ROWS = [{"conversations": [{"from": "human", "value": QUESTION}, {"from": "gpt", "value": ANSWER}]}] * 2
TABLES = {
    "a.json": json.dumps(ROWS, indent=1),
    "b.json": "\n".join(map(json.dumps, ROWS)),
    "c.csv": f'\ufeffid,question,answer\r\n1,{QUESTION},"{ANSWER}"\r\n\r\n2,{QUESTION},"{ANSWER}"\r\n',
    "d.csv": f"prompt;response\n{QUESTION} ; {ANSWER}\n{QUESTION};{ANSWER} ",
    "e.tsv": f"instruction\t input\toutput\n{QUESTION}\t\t{ANSWER}\n{QUESTION}\t\t{ANSWER}\n",
}


@pytest.mark.parametrize("name", TABLES)
def test_lists_and_tables_give_the_same_examples(plain, tmp_path, name):
    (tmp_path / name).write_text(TABLES[name])
    expected = plain.example(TURN)
    found = examples(tmp_path / name, plain)
    assert len(found) == 2
    for example in found:
        assert np.array_equal(example.ids, expected.ids) and np.array_equal(example.learned, expected.learned)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.json", '[{"text": "a"} {"text": "b"}]', ["item 1: ", "comma"]),
        ("a.json", '[{"text": "a"}, nothing]', ["item 2: not JSON"]),
        ("a.json", '[{"text": "a"},', ["item 2: not JSON"]),
        ("a.json", '[{"text": "a", "text": "b"}]', ["item 1: ", "duplicate"]),
        ("a.json", "[" * 99999, ["item 1: "]),
        *(
            ("a.json", f'[{{"text": "a"}}{end}', [word])
            for end, word in ((",]", "item 1"), ("] b", "follows the list"))
        ),
        ("a.json", "[]", ["has no rows"]),
        ("a.csv", "prompt,prompt\na,b", ["same name"]),
        ("a.csv", "prompt,completion\n", ["has no rows"]),
        ("a.csv", "prompt,completion\na", ["line 2: ", "2 columns"]),
        ("a.csv", "prompt,completion\na,b,c", ["line 2: ", "2 columns"]),
        ("a.csv", 'prompt,completion\na,"b', ["line 2: "]),
        ("a.csv", "frage,antwort\na,b", ["line 2: it has 'frage', 'antwort'", "'question'"]),
        ("a.tsv", b"text\n\xff\n", ["not UTF-8", "iconv"]),
        ("a.pdf", b"x", ["convert it to plain text"]),
    ],
)
def test_invalid_lists_and_tables_are_rejected(plain, tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content.encode() if isinstance(content, str) else content)
    with complains(name, *words):
        examples(tmp_path / name, plain)


def test_long_texts_are_split_without_loss(tmp_path):
    chat, said = ChatFormat(load_tokenizer("byte", "")), []
    (tmp_path / "a.md").write_text("0123456789" * 3)
    parts = _fitting(tmp_path / "a.md", chat, 8, said.append)
    together = _together(parts)
    assert [len(part.ids) for part in parts] == [9, 9, 9, 6] and not said
    assert bytes(together.read(0, 29).tolist()) == b"0123456789" * 2 + b"012345678"
    assert bytes(together.targets.tolist()) == b"123456789" + b"0123456789" * 2
