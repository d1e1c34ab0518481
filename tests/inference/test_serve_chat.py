"""OpenAI's chat completions by `distgpt serve`: against the engine itself, streams, refusals, templates."""

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from chattemplates import settings
from distgpt.core.base.errors import DataError
from distgpt.core.generate.engine import Engine, complete
from distgpt.core.generate.engine_setup import slots_for
from distgpt.core.generate.request import Request
from distgpt.corpora.chats.format import ChatFormat
from distgpt.inference.serving.completions import Served, parse_chat
from distgpt.inference.serving.limits import Limits, Refusal
from families import write_family
from serving import pieces, sample, server

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "Brief."}, {"role": "user", "content": "The harbour"}]
HOT = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "seed": 7}


@pytest.fixture(scope="module")
def served():
    with server() as found:
        yield found


def asked(served, **body):
    status, _, found = served.ask(CHAT, {"messages": MESSAGES, **body})
    assert status == 200, found
    return found


def directly(messages=MESSAGES, **how):
    model, tokenizer = sample()
    chat = ChatFormat(tokenizer)
    request = Request(chat.prompt(messages), overflow="stop", stop=chat.stops, **how)
    return complete(Engine(slots_for(model, 2), tokenizer), [request])[0]


def test_an_answer_is_what_the_engine_makes_of_the_template_s_text(served):
    found = asked(served, max_tokens=20, n=2, **HOT)
    expected = directly(max_new_tokens=20, n=2, **HOT)
    assert [each["message"]["content"] for each in found["choices"]] == [each.text for each in expected]
    assert {each["message"]["role"] for each in found["choices"]} == {"assistant"}
    assert {each["finish_reason"] for each in found["choices"]} == {"length"}
    assert found["object"] == "chat.completion" and found["id"].startswith("chatcmpl-")
    assert found["usage"]["completion_tokens"] == 40


def test_the_next_turn_gets_the_same_answer_from_what_was_kept(served):
    (first,) = asked(served, max_tokens=10, temperature=0)["choices"]
    turns = [*MESSAGES, first["message"], {"role": "user", "content": "And?"}]
    plain = [{"role": each["role"], "content": each["content"]} for each in turns]
    (second,) = asked(served, messages=turns, max_tokens=10, temperature=0)["choices"]
    assert second["message"]["content"] == directly(plain, max_new_tokens=10)[0].text


def test_a_stream_says_the_same_and_names_the_role_first(served):
    how = {"max_tokens": 12, "n": 2, "logprobs": True, "top_logprobs": 2, **HOT}
    whole = asked(served, **how)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *parts, last = pieces(served.ask(CHAT, {"messages": MESSAGES, **how, **options})[2])
    assert last["usage"] == whole["usage"] and last["choices"] == []
    assert {part["object"] for part in parts} == {"chat.completion.chunk"}
    for choice in whole["choices"]:
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert [part["delta"].get("role") for part in mine] == ["assistant"] + [None] * (len(mine) - 1)
        assert "".join(part["delta"].get("content", "") for part in mine) == choice["message"]["content"]
        found = [each for part in mine if part["logprobs"] for each in part["logprobs"]["content"]]
        assert found == choice["logprobs"]["content"] and len(found) == 12
        for each in found:
            assert bytes(each["bytes"]).decode("utf-8", "ignore") in each["token"]
            assert len(each["top_logprobs"]) == 2
            assert each["logprob"] <= each["top_logprobs"][0]["logprob"]
        assert mine[-1]["finish_reason"] == "length"


def test_without_a_length_an_answer_may_fill_the_context(served):
    (found,) = asked(served, temperature=0, seed=1)["choices"]
    assert found["finish_reason"] in ("length", "stop")
    _, tokenizer = sample()
    used = len(ChatFormat(tokenizer).prompt(MESSAGES)) + len(found["message"]["content"].encode())
    assert used >= 100 or found["finish_reason"] == "stop"
    text = found["message"]["content"]
    (found,) = asked(served, temperature=0, stop=[text[3:5]])["choices"]
    assert found["message"]["content"] == text[: text.index(text[3:5])] and found["finish_reason"] == "stop"


def test_what_makes_no_sense_is_refused(served):
    for body, message in (
        ({"messages": None}, "messages must be a list"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "the role 'robot' is unknown"),
        ({"messages": [{"role": "user", "content": "x" * 500}]}, "context is 128 tokens"),
        ({"prompt": "a"}, "unrecognized request argument: 'prompt'"),
        ({"top_logprobs": 3}, "needs logprobs"),
        ({"logprobs": 3}, "logprobs is 3"),
        ({"tools": [{"type": "function"}]}, "tools is not supported"),
        ({"response_format": {"type": "json_object"}}, "response_format is not supported"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"n": 1000}, "n is 1000"),
    ):
        status, _, found = served.ask(CHAT, {"messages": MESSAGES, **body})
        assert status == 400 and message in found["error"]["message"], (body, found)
        assert "messages" not in body or found["error"]["param"] == "messages"
    status, _, found = served.ask(CHAT, {"messages": MESSAGES, "model": "other"})
    assert status == 404 and found["error"]["code"] == "model_not_found"
    same = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "user": "me", "store": True}
    assert asked(served, max_tokens=1, **same)["choices"]


def parsed(served, body):
    return parse_chat(body.encode(), served, Limits()).requests[0]


def test_a_model_s_own_template_and_its_end_are_used(tmp_path):
    chat = ChatFormat(write_family(tmp_path / "model", "llama3", **settings("llama3")))
    about = Served("it", chat.tokenizer, chat.tokenizer.size, 64, 0, chat)
    request = parsed(about, '{"messages": [{"role": "user", "content": "hi"}]}')
    assert request.prompt == chat.prompt([{"role": "user", "content": "hi"}]) and request.reuse
    assert chat.tokenizer.specials["<|eot_id|>"] in request.ends and request.stop == ()
    assert request.max_new_tokens == 64 - len(request.prompt)
    assert parsed(about, '{"messages": [{"role": "user", "content": "hi"}], "ignore_eos": true}').ends == ()
    broken = Served("it", chat.tokenizer, 256, 64, 0, DataError("the model's chat template: no"))
    with pytest.raises(Refusal) as refusal:
        parsed(broken, '{"messages": []}')
    assert "does not chat: the model's chat template: no" in refusal.value.text
