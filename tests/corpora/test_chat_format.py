"""Chats as tokens: templates of families, our own formats, special tokens apart, hostile templates."""

import select
import time

import numpy as np
import pytest
from chattemplates import BEGINS, ENDS, TEMPLATES, settings
from complaints import complains
from distgpt.core.base.errors import DataError
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.corpora.chats.format import ChatFormat, Renderer, checked_messages, encode_parts
from families import document, write_family
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizing import small

CHAT = [
    {"role": "user", "content": "Where is the lamp? "},
    {"role": "assistant", "content": "In the 12th harbour."},
    {"role": "user", "content": "naïve\n\ncafé 中"},
]


def library_ids(family, messages, asks):
    """What transformers does: the template's text, in which the library finds special tokens."""
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


def test_a_prompt_has_the_ids_of_the_template_s_text(family, chat):
    """A message that spells special tokens ends nothing."""
    for messages in (CHAT[:1], CHAT):
        assert chat.prompt(messages) == library_ids(family, messages, True)
    end, spelled = chat.tokenizer.specials[ENDS[family]], f"hi {ENDS[family]} there"
    assert end in chat.ends and chat.stops == ()
    plain, found = (chat.prompt([{"role": "user", "content": text}]) for text in ("hi", spelled))
    assert found.count(end) == plain.count(end)
    assert spelled in chat.tokenizer.decode(found)


def test_answers_are_learned_with_the_token_that_ends_them(family, chat):
    answers = ["In the harbour.", "é, as <|im_end|> </s> said."]
    user = [{"role": "user", "content": "In the harbour."}]
    messages = [message for text in answers for message in (*user, {"role": "assistant", "content": text})]
    ids, learned = chat.example(messages)
    if not any(spelled in answers[1] for spelled in chat.tokenizer.specials):
        assert ids.tolist() == library_ids(family, messages, False)
    spans = np.split(ids, np.flatnonzero(np.diff(learned)) + 1)[1::2]
    decoded = [chat.tokenizer.decode(span).strip() for span in spans]
    assert decoded == [text + ENDS[family] for text in answers]
    assert all(span[-1] == chat.tokenizer.specials[ENDS[family]] for span in spans)
    if family != "mistral":  # whose blank before an answer belongs to its first token
        at = learned.tolist().index(1)
        shared = chat.prompt(user)
        assert ids[:at].tolist()[: len(shared)] == shared


def test_without_a_template_a_tokenizer_chats_in_chatml_or_in_plain_words(tmp_path):
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
        ids, learned = plain.example(CHAT[:2])
        assert tokenizer.decode(ids[learned == 1]) == "In the 12th harbour." + (end or "\n\nUser:\n")
        assert (tokenizer.separator in plain.ends) == bool(end)


def test_what_a_template_leaves_out_of_an_answer_cannot_be_learned(tmp_path):
    chat = ChatFormat(write_family(tmp_path / "model", "qwen", **settings("qwen")))
    thought = [CHAT[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHere."}]
    ids, learned = chat.example(thought)
    assert chat.tokenizer.decode(ids[learned == 1]) == "<think>\nhm\n</think>\n\nHere.<|im_end|>"
    with complains("changes or drops an answer"):
        chat.example([*thought, *CHAT[:2]])


# Templates of others


@pytest.mark.ci
def test_templates_are_programs_that_are_held_in_bounds():
    """Neither time, nor memory, nor what lies around a value is theirs; the next one is not affected."""
    bounded = Renderer(seconds=1.5)
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    doubled = "{% set ns = namespace(a='ab') %}"
    doubled += "{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}"
    for source, message in (
        (loop, "longer than 1.5 s"),
        (doubled, "memory"),
        ("{{ 'a' * 20000000 }}", "a text of 20,000,000 characters"),
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


def test_an_interrupted_template_does_not_answer_the_next_question(monkeypatch):
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


def test_messages_of_others_are_checked():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert checked_messages([{"role": "user", "content": parts, "name": "x"}]) == [{"role": "user", "content": "ab"}]
    for value, message in (
        (None, "must be a list"),
        ([], "not empty"),
        ([3], "message 1 is no object"),
        ([CHAT[0], {"content": "a"}], "message 2 is no object with a role"),
        ([{"role": "asistant", "content": "a"}], "'asistant' is unknown; did you mean 'assistant'"),
        ([{"role": "user", "content": None}], "message 1: its content is no text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "its content is no text"),
    ):
        with pytest.raises(DataError, match=message):
            checked_messages(value)


@pytest.mark.ci
@pytest.mark.timing
def test_a_message_full_of_special_tokens_takes_time_in_proportion_to_its_length():
    """Not to the square of it: a message of a megabyte kept a server busy for seconds."""
    chat = ChatFormat(small())

    def seconds(count):
        begun = time.process_time()
        assert len(chat.prompt([{"role": "user", "content": "<|endoftext|>" * count}])) > count
        return time.process_time() - begun

    seconds(80_000)  # compiles the encoder of large texts
    assert seconds(80_000) < 25 * min(seconds(10_000) for _ in range(3))


def test_a_tokenizer_of_words_cannot_encode_chats():
    with complains("not 'word'"):
        encode_parts(load_tokenizer("word", "a lamp"), ["a"])
