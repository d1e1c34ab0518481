import json
import os
import re
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np
import pytest
from distgpt.core.comm.api import SerialComm
from distgpt.core.train.assessment import Scorer
from distgpt.inference.evaluation.benchmark import Benchmark, likelihoods, read_questions
from peers import peer_with
from serving import pieces, sample, server

from conftest import TESTS, wait_for

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from chattemplates import settings
from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.data.tokenizers import ByteTokenizer
from distgpt.core.generate.engine import Engine, complete
from distgpt.core.generate.engine_setup import slots_for
from distgpt.core.generate.request import Request
from distgpt.core.generate.sample import default_prompt
from distgpt.corpora.chats.format import ChatFormat
from distgpt.inference.serving.answers import Served
from distgpt.inference.serving.completions import PARAMETERS, parse_body, parse_chat
from distgpt.inference.serving.limits import Limits, Refusal
from distgpt.inference.serving.server import checked_key
from families import write_family
from serving import pieces, sample, server

HOT = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 7}
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "Brief."}, {"role": "user", "content": "The harbour"}]
ASKED = {TEXT: {"prompt": "The harbour"}, CHAT: {"messages": MESSAGES}}


def count(text):
    return len(sample()[1].encode(text))


LIKELY = {TEXT: {"logprobs": 3}, CHAT: {"logprobs": True, "top_logprobs": 3}}
both = pytest.mark.parametrize("path", ASKED)


@pytest.fixture(scope="module")
def served():
    with server() as found:
        yield found


def asked(served, path, **body):
    status, _, found = served.ask(path, {**ASKED[path], **body})
    assert status == 200, found
    return found


def text_of(choice):
    return choice["text"] if "text" in choice else choice["message"]["content"]


def directly(prompt, **settings):
    """Complete a string, tokens or chat messages with the engine."""
    model, tokenizer = sample()
    if isinstance(prompt, str):
        prompt = tokenizer.encode(prompt).tolist()
    elif isinstance(prompt[0], dict):
        chat = ChatFormat(tokenizer)
        prompt, settings = chat.prompt(prompt), {"overflow": "stop", "stop": chat.stops, **settings}
    return complete(Engine(slots_for(model, 2), tokenizer), [Request(prompt, **settings)])[0]


@both
def test_answer_matches_engine(served, path):
    found = asked(served, path, max_tokens=30, n=3, **HOT)
    (prompt,) = ASKED[path].values()
    expected = directly(prompt, max_new_tokens=30, n=3, **HOT, overflow="stop")
    assert [text_of(choice) for choice in found["choices"]] == [sample.text for sample in expected]
    assert len({text_of(choice) for choice in found["choices"]}) == 3
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert {choice["finish_reason"] for choice in found["choices"]} == {"length"}
    assert {choice["logprobs"] for choice in found["choices"]} == {None}
    used = found["usage"]
    assert used["completion_tokens"] == 90 and used["total_tokens"] == used["prompt_tokens"] + 90
    assert found["model"] == "sample"
    if path == TEXT:
        assert used["prompt_tokens"] == count("The harbour")
        assert found["object"] == "text_completion" and found["id"].startswith("cmpl-")
    else:
        assert {choice["message"]["role"] for choice in found["choices"]} == {"assistant"}
        assert found["object"] == "chat.completion" and found["id"].startswith("chatcmpl-")


@pytest.mark.parametrize("path, more", [(TEXT, {"prompt": ["The harbour", "A lamp"]}), (CHAT, {})])
def test_stream_matches_whole_answer(served, path, more):
    how = {**ASKED[path], **LIKELY[path], **more, "max_tokens": 12, "n": 2, **HOT}
    whole = asked(served, path, **how)
    options = {"stream": True, "stream_options": {"include_usage": True}}
    status, headers, text = served.ask(path, {**how, **options})
    assert status == 200 and headers["content-type"] == "text/event-stream"
    *parts, last = pieces(text)
    assert last["choices"] == [] and last["usage"] == whole["usage"] and {part["usage"] for part in parts} == {None}
    assert {part["object"] for part in parts} == {"text_completion" if path == TEXT else "chat.completion.chunk"}
    for choice in whole["choices"]:
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        said = [part.get("text") or part.get("delta", {}).get("content", "") for part in mine]
        assert "".join(said) == text_of(choice)
        assert [part["finish_reason"] for part in mine] == [None] * (len(mine) - 1) + ["length"]
        for name, values in choice["logprobs"].items():
            parted = [each for part in mine for each in (part["logprobs"] or {}).get(name) or ()]
            assert parted == (values or []), name
        if path == TEXT:
            assert len(mine) == 12
        else:
            assert [part["delta"].get("role") for part in mine] == ["assistant"] + [None] * (len(mine) - 1)
            assert len(choice["logprobs"]["content"]) == 12
            for each in choice["logprobs"]["content"]:
                assert bytes(each["bytes"]).decode("utf-8", "ignore") in each["token"]
                assert len(each["top_logprobs"]) == 3 and each["logprob"] <= each["top_logprobs"][0]["logprob"]


def test_logprobs_include_chosen_token(served):
    said = asked(served, TEXT, max_tokens=40, logprobs=1, temperature=3, seed=1)["choices"][0]["logprobs"]
    assert {len(top) for top in said["top_logprobs"]} == {1, 2}
    assert all(token in top for token, top in zip(said["tokens"], said["top_logprobs"], strict=True))


@pytest.mark.parametrize("new", [0, 1, 9])
def test_echo_scores_prompt_tokens(served, new):
    """Evaluation harnesses send prompts as text or tokens, with one or no new token."""
    prompt = "The harbour" if new != 1 else sample()[1].encode("The harbour").tolist()
    wanted = {"echo": True, "logprobs": 2, "temperature": 0, "max_tokens": new}
    (expected,) = directly(prompt, max_new_tokens=new, logprobs=2, prompt_logprobs=True)
    (found,) = served.complete(prompt, **wanted)["choices"]
    assert found["text"] == "The harbour" + expected.text and found["finish_reason"] == "length"
    said, scored = found["logprobs"], [*expected.prompt_likelihoods[1:], *(expected.likelihoods or ())]
    assert said["token_logprobs"] == [None, *(each.logprob for each in scored)]
    assert said["top_logprobs"][0] is None and len(said["top_logprobs"]) == count("The harbour") + new
    for token, top, own in zip(said["tokens"][1:], said["top_logprobs"][1:], scored, strict=True):
        assert top[token] == own.logprob and max(top.values()) == own.alternatives[0][1] and len(top) in (2, 3)
    for token, offset in zip(said["tokens"], said["text_offset"], strict=True):
        assert found["text"][offset : offset + len(token)] == token
    parts = [part["choices"][0] for part in pieces(served.ask(TEXT, {"prompt": prompt, "stream": True, **wanted})[2])]
    assert "".join(part["text"] for part in parts) == found["text"]
    for name, values in said.items():
        assert [value for part in parts for value in (part["logprobs"] or said)[name]] == values, name
    several = served.complete(["A lamp", "The harbour"], n=2, **{**wanted, "max_tokens": 0})
    assert [choice["text"] for choice in several["choices"]] == ["A lamp"] * 2 + ["The harbour"] * 2
    for choice in several["choices"][2:]:
        assert choice["logprobs"]["token_logprobs"] == said["token_logprobs"][: count("The harbour")]
    assert several["usage"]["completion_tokens"] == 0


def test_prompts_may_be_text_tokens_or_lists(served):
    tokens = sample()[1].encode("The harbour").tolist()
    same = {"max_tokens": 12, "temperature": 0}
    text = served.complete("The harbour", **same)["choices"][0]["text"]
    assert served.complete(tokens, **same)["choices"][0]["text"] == text
    for several in (["A lamp", "The harbour"], [tokens[:3], tokens]):
        found = served.complete(several, **same)
        assert len(found["choices"]) == 2 and found["choices"][1]["text"] == text
    nothing = served.complete(None, **same)["choices"][0]["text"]
    assert nothing == directly(default_prompt(sample()[1]), max_new_tokens=12)[0].text
    assert served.complete("The harbour", echo=True, **same)["choices"][0]["text"] == "The harbour" + text


def test_chat_answer_may_fill_context(served):
    found = asked(served, CHAT, temperature=0, seed=1)
    (choice,), text = found["choices"], text_of(found["choices"][0])
    assert choice["finish_reason"] == "stop" or found["usage"]["total_tokens"] >= 128
    (again,) = asked(served, CHAT, temperature=0, stop=[text[3:5]])["choices"]
    assert text_of(again) == text[: text.index(text[3:5])] and again["finish_reason"] == "stop"


def test_connections_disable_nagle(served):
    """Clients delay acknowledgements by 40 ms, which would limit them to 25 small requests per second."""
    connection = served.connect()
    connection.request("GET", "/health")
    assert connection.getresponse().read()
    for each in list(served.serving.server_state.connections):
        assert each.transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    connection.close()


def test_completion_ends_at_the_context(served):
    (found,) = served.complete("The harbour", max_tokens=200)["choices"]
    assert found["finish_reason"] == "length"
    assert served.complete("x" * 100, max_tokens=100)["usage"]["completion_tokens"] == 29
    assert served.complete("x" * 100, max_tokens=60, overflow="shift")["usage"]["completion_tokens"] == 60
    long = {"prompt": "x" * 300, "max_tokens": 5}
    status, _, said = served.ask(TEXT, long)
    assert status == 400 and said["error"]["code"] == "context_length_exceeded"
    assert "128" in said["error"]["message"] and "300" in said["error"]["message"]
    assert served.complete(**long, overflow="shift", temperature=0)["usage"]["prompt_tokens"] == 300


def test_seeds_are_repeatable_in_any_batch(served):
    def text(seed):
        more = {} if seed is None else {"seed": seed}
        return served.complete("The harbour", max_tokens=40, **more)["choices"][0]["text"]

    alone = [text(seed) for seed in range(-3, 5)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(text, range(-3, 5))) == alone
    assert len(set(alone)) == 8 and text(None) != text(None)


WRONG = [
    (TEXT, b"", 400, "JSON"), (TEXT, b"[1]", 400, "object"), (TEXT, b"\xff{}", 400, "UTF-8"),
    (TEXT, b'{"prompt": "a", "prompt": "b"}', 400, "duplicate"), (TEXT, b'{"temperature": NaN}', 400, "NaN"),
    (TEXT, b'{"prompt": "\\ud800"}', 400, "UTF-8"), (TEXT, b"[" * 100_000, 400, "deep"),
    (TEXT, {"prompt": ""}, 400, "empty"), (TEXT, {"prompt": ["a", 1]}, 400, "mix"),
    (TEXT, {"prompt": [1024]}, 400, "1,024"), (TEXT, {"prompt": ["a"] * 65, "n": 2}, 400, "samples"),
    (TEXT, {"max_tokens": 4096, "n": 128, "logprobs": 2}, 400, "1,048,576"),
    (TEXT, {"max_tokens": -1}, 400, "max_tokens"), (TEXT, {"max_tokens": 5000}, 400, "at most 4096"),
    (TEXT, {"temperature": -1}, 400, "temperature"),
    (TEXT, {"prompt": "a" * 300, "logprobs": 1, "echo": True, "overflow": "shift"}, 400, "omit logprobs"),
    (TEXT, {"prompt": ["a" * 100] * 128, "max_tokens": 400, "logprobs": 20, "echo": True}, 400, "1,347,200"),
    (TEXT, {"stop": "a" * 300}, 400, "stop"), (TEXT, {"stream": "yes"}, 400, "stream"),
    (TEXT, {"overflow": "wrap"}, 400, "overflow"), (TEXT, {"best_of": 3}, 400, "best_of"),
    (TEXT, {"max_token": 3}, 400, "did you mean 'max_tokens'"), (TEXT, {"model": "gpt-5"}, 404, "gpt-5"),
    (CHAT, {"messages": None}, 400, "messages must be a non-empty list"),
    (CHAT, {"messages": [{"role": "robot", "content": "a"}]}, 400, "unknown role 'robot'"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 500}]}, 400, "the context of 128"),
    (CHAT, {"prompt": "a"}, 400, "unrecognized request argument: 'prompt'"),
    (CHAT, {"top_logprobs": 3}, 400, "requires logprobs"), (CHAT, {"logprobs": 3}, 400, "logprobs must"),
    (CHAT, {"tools": [{"type": "function"}]}, 400, "tools is not supported"),
    (CHAT, {"response_format": {"type": "json_object"}}, 400, "response_format is not supported"),
    (CHAT, {"max_tokens": 0}, 400, "max_tokens must"), (CHAT, {"n": 1000}, 400, "n must"),
    (CHAT, {"model": "other"}, 404, "other"), ("/tokenize", {"prompt": 3}, 400, "prompt"),
    ("/tokenize", {"text": "a"}, 400, "text"), ("/detokenize", {"tokens": "a"}, 400, "tokens"),
    ("/detokenize", {"tokens": [1 << 20]}, 400, "1,024"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "word"), WRONG, ids=lambda value: str(value)[:40])
def test_invalid_bodies_are_rejected_like_openai(served, path, body, status, word):
    found, _, said = served.ask(path, body if isinstance(body, bytes) else {**ASKED.get(path, {}), **body})
    assert found == status and set(said) == {"error"}, said
    assert set(said["error"]) == {"message", "type", "param", "code"}
    assert said["error"]["type"] == "invalid_request_error" and word in said["error"]["message"]
    assert "messages" not in str(body) or said["error"]["param"] == "messages"
    assert status != 404 or said["error"]["code"] == "model_not_found"


def test_ineffective_parameters_are_accepted(served):
    same = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "user": "me", "store": True}
    assert asked(served, CHAT, max_tokens=1, **same)["choices"]


def test_random_bodies_are_parsed_or_rejected():
    random = Random(2026)
    about = Served("sample", sample()[1], 256, 128, 0)
    values = [None, True, -1, 0, 1, 2**63, 1e300, "", "a", [], [[]], ["a"], [1], {}, {"include_usage": True}]
    refused = 0
    for _ in range(1000):
        body = {name: random.choice(values) for name in random.sample(PARAMETERS, random.randint(0, 4))}
        data = bytearray(json.dumps({"prompt": "a", **body}).encode())
        for _ in range(random.choice((0, 0, 1, 3))):
            place = random.randrange(len(data))
            data[place : place + random.randint(0, 3)] = random.randbytes(random.randint(0, 2))
        try:
            assert parse_body(bytes(data), about, Limits()).requests
        except Refusal as error:
            refused += 1
            assert error.status in (400, 404) and json.dumps(error.as_json())
    assert 160 < refused < 970


def test_separator_ends_completion_unless_ignored():
    about = Served("it", ByteTokenizer(), 256, 64, 0)
    about.tokenizer.separator = 65
    (request,) = parse_body(b'{"prompt": "a", "stop": "b"}', about, Limits()).requests
    assert request.stop == ("b",) and request.ends == (65,)
    (request,) = parse_body(b'{"prompt": "a", "ignore_eos": true}', about, Limits()).requests
    assert request.ends == ()


def test_chat_uses_model_template_and_end(tmp_path):
    chat = ChatFormat(write_family(tmp_path / "model", "llama3", **settings("llama3")))
    about, messages = Served("it", chat.tokenizer, chat.tokenizer.size, 64, 0, chat), MESSAGES[1:]
    request, ignoring = (
        parse_chat(json.dumps({"messages": messages, **more}).encode(), about, Limits()).requests[0]
        for more in ({}, {"ignore_eos": True})
    )
    assert request.prompt == chat.prompt(messages) and request.reuse
    assert chat.tokenizer.specials["<|eot_id|>"] in request.ends and request.stop == ()
    assert request.max_new_tokens == 64 - len(request.prompt) and ignoring.ends == ()
    broken = Served("it", chat.tokenizer, 256, 64, 0, DataError("the model's chat template: no"))
    with pytest.raises(Refusal) as refusal:
        parse_chat(b'{"messages": []}', broken, Limits())
    assert "does not support chat: the model's chat template: no" in refusal.value.text


def test_tokenize_and_detokenize_are_inverse(served):
    status, _, about = served.ask("/tokenizer_info")
    assert status == 200 and {"bos_token", "eos_token", "chat_template"} <= about.keys()
    for text in ("The lamp", "The lamp. " * 1000, "a\0b", "", None):
        said = served.ask("/tokenize", {"prompt": text, "add_special_tokens": False})[2]
        assert said["tokens"] == sample()[1].encode(text or "").tolist() and said["count"] == len(said["tokens"])
        assert said["max_model_len"] == 128
        if len(said["tokens"]) < 100:
            assert served.ask("/detokenize", {"tokens": said["tokens"]})[2] == {"prompt": text or ""}


def test_models_are_listed(served):
    status, _, found = served.ask("/v1/models")
    assert status == 200 and [model["id"] for model in found["data"]] == ["sample"]
    assert served.ask("/v1/models/sample")[2] == found["data"][0]
    status, _, said = served.ask("/v1/models/other/one")
    assert status == 404 and said["error"]["code"] == "model_not_found"
    assert served.ask("/health")[2] == {"status": "ok"}


@pytest.mark.parametrize("path, status", [("/nothing", 404), (TEXT, 405)])
def test_unknown_paths_and_methods_are_rejected(served, path, status):
    found, headers, said = served.ask(path, method="GET")
    assert found == status and path in said["error"]["message"]
    assert headers.get("allow") == ("POST" if status == 405 else None)


def test_page_policy_allows_only_its_script(served):
    status, headers, text = served.ask("/")
    policy = headers["content-security-policy"]
    assert status == 200 and policy.startswith("default-src 'none'") and "; script-src 'sha256-" in policy
    assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert not re.search(r"""(src|href)=["']?(https?:)?//|@import|url\(|\son\w+=|\sstyle=""", text)


def test_requests_from_other_sites_are_rejected(served):
    status, headers, _ = served.ask("/v1/completions", b"{}", headers={"Content-Type": "text/plain"})
    assert status == 415 and "access-control-allow-origin" not in headers
    asking = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    status, headers, _ = served.ask("/v1/completions", method="OPTIONS", headers=asking)
    assert status == 405 and "access-control-allow-origin" not in headers
    for path in ("/", "/v1/models", "/metrics"):
        assert served.ask(path, headers={"Host": f"evil.example:{served.port}"})[0] == 403
        assert served.ask(path, headers={"Host": f"localhost:{served.port}"})[0] == 200


def test_allowed_origin_passes_preflight():
    with server(origins=("https://example.org",)) as found:
        asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
        for origin, status in (("https://example.org", 200), ("https://example.com", 400)):
            answer, headers, _ = found.ask("/v1/completions", method="OPTIONS", headers={"Origin": origin, **asking})
            assert answer == status
            assert headers.get("access-control-allow-origin") == (origin if status == 200 else None)


def test_api_key_is_required(capsys):
    with server(key="s3cret") as found:
        for given in (None, "Bearer wrong", "Bearer ", "s3cre", "Bearer s3cret2", "Bearer \xe4"):
            headers = {} if given is None else {"Authorization": given}
            for path, body in (("/v1/completions", {"prompt": "a"}), ("/v1/models", None), ("/metrics", None)):
                status, answer, said = found.ask(path, body, headers=headers)
                assert status == 401 and answer["www-authenticate"] == "Bearer", given
                assert said["error"]["code"] == "invalid_api_key" and "s3cret" not in str(said)
        good = {"Authorization": "Bearer s3cret", "Host": "any.example"}
        assert found.ask("/v1/completions", {"prompt": "a", "max_tokens": 1}, headers=good)[0] == 200
        assert found.ask("/")[0] == found.ask("/health")[0] == 200
    for wrong in ("", " ", "a b", "ä", "a\n"):
        with pytest.raises(UsageError, match="API key"):
            checked_key(wrong)
    with server(host="0.0.0.0") as found:
        assert found.ask("/health", headers={"Host": "any.example"})[0] == 200
    assert "--api-key" in capsys.readouterr().err


def test_metrics_count_requests_and_tokens():
    with server() as found:
        found.complete("The harbour", max_tokens=10, n=2)
        found.ask("/v1/completions", b"{")
        status, headers, text = found.ask("/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    values = {name: float(value) for name, value in samples}
    assert [values[f'distgpt_requests_total{{status="{status}"}}'] for status in (200, 400)] == [1, 1]
    assert (
        values["distgpt_prompt_tokens_total"] == count("The harbour") and values["distgpt_generated_tokens_total"] == 20
    )
    assert values["distgpt_lanes"] == 4
    for gauge in ("queue_length", "running_sequences", "open_requests"):
        assert values[f"distgpt_{gauge}"] == 0
    for name in ("first_token_seconds", "request_seconds"):
        buckets = [values[key] for key in values if key.startswith(f"distgpt_{name}_bucket")]
        assert buckets == sorted(buckets) and buckets[-1] == values[f"distgpt_{name}_count"] == 1
        assert 0 < values[f"distgpt_{name}_sum"] < 20
    declared = re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)
    assert len(declared) == len(set(declared)) and text.endswith("\n") and "_created" not in text


def test_log_trusts_only_configured_proxies(capsys):
    for proxies, who in (((), "127.0.0.1"), (("10.0.0.2",), "127.0.0.1"), (("127.0.0.0/8",), "9.9.9.9")):
        with server(log="requests", proxies=proxies) as found:
            found.ask("/health", headers={"X-Forwarded-For": "9.9.9.9"})
        assert f" {who} GET /health 200" in capsys.readouterr().err


def test_log_lines_omit_prompts_by_default(capsys):
    for log in ("requests", "prompts"):
        with server(log=log) as found:
            found.complete("The \x1b[2Jharbour", max_tokens=3)
            found.ask("/v1/%1b[2J")
        said = capsys.readouterr().err
        lines = [line for line in said.splitlines() if " 127.0.0.1 " in line]
        assert "\x1b" not in said and len(lines) == 2
        tokens = count("The \x1b[2Jharbour")
        assert re.search(rf"POST /v1/completions 200 \d\.\d{{3}} s, {tokens} \+ 3 tokens", lines[0])
        assert ("harbour" in lines[0]) == (log == "prompts") and r"GET /v1/\x1b[2J 404" in lines[1]


LM_EVAL, (peer, needs_lm_eval) = peer_with("DISTGPT_LMEVAL_PYTHON", "lm_eval")
OPENAI, (_, needs_openai) = peer_with("DISTGPT_PEER_PYTHON", "openai")

TASK = """\
task: ours
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question.stem}}\\nAnswer:"
doc_to_choice: "{{question.choices|map(attribute='text')|list}}"
doc_to_target: "{{(question.choices|map(attribute='label')|list).index(answerKey)}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
"""


def questions(folder):
    """Write a file in ARC's format; return it, its benchmark and a scorer of the sample model."""
    draw = np.random.default_rng(4)
    words = ["harbour", "lamp", "boat", "sea", "letter", "tower", "keeper", "morning"]
    path = folder / "arc.jsonl"
    with path.open("w") as file:
        for _ in range(30):
            texts = [" ".join(draw.choice(words, count)) for count in draw.integers(1, 5, 4)]
            choices = [{"text": text, "label": label} for text, label in zip(texts, "ABCD", strict=True)]
            asked = {"stem": f"What of the {draw.choice(words)}?", "choices": choices}
            file.write(json.dumps({"question": asked, "answerKey": str(draw.choice(list("ABCD")))}) + "\n")
    model, tokenizer = sample()
    return path, Benchmark(read_questions("arc_easy", path), tokenizer, 128), Scorer(model, SerialComm())


def test_harness_request_gets_eval_likelihoods(tmp_path):
    _, benchmark, scorer = questions(tmp_path)
    spans = benchmark.spans[:12]
    body = {"prompt": [span.ids.tolist() for span in spans], "temperature": 0, "seed": 1234}
    with server() as found:
        body |= {"max_tokens": 1, "logprobs": 1, "echo": True}  # the request of lm-eval
        choices = found.ask("/v1/completions", body)[2]["choices"]
    for choice, span, (loss, greedy) in zip(choices, spans, likelihoods(scorer, spans), strict=True):
        known = {name: choice["logprobs"][name][span.first : -1] for name in ("token_logprobs", "top_logprobs")}
        assert sum(known["token_logprobs"]) == pytest.approx(-loss, abs=1e-4)
        best = [max(top.values()) for top in known["top_logprobs"]]
        assert greedy == (known["token_logprobs"] == best)


@peer
@needs_lm_eval
def test_lm_eval_agrees_with_eval(tmp_path):
    path, benchmark, scorer = questions(tmp_path)
    (tmp_path / "ours.yaml").write_text(TASK.replace("FILE", str(path)))
    with server() as found:
        model = f"model=sample,base_url=http://127.0.0.1:{found.port}/v1/completions"
        command = [LM_EVAL, "-m", "lm_eval", "--model", "local-completions", "--tasks", "ours"]
        command += ["--model_args", f"{model},tokenizer_backend=remote,max_length=128,num_concurrent=4"]
        command += ["--include_path", tmp_path, "--output_path", tmp_path / "out.json"]
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
        ran = subprocess.run(command, env=os.environ | offline, capture_output=True, text=True, timeout=300)
        assert ran.returncode == 0, ran.stderr
    (written,) = tmp_path.glob("out*.json")
    said, ours = json.loads(written.read_text())["results"]["ours"], benchmark.measure(scorer)
    assert said["acc,none"] == pytest.approx(ours["acc"]) and said["acc_norm,none"] == pytest.approx(ours["acc_norm"])


TEXT_BODY = {"prompt": "The harbour", "temperature": 0, "max_tokens": 8}
CHAT_BODY = {"messages": [{"role": "user", "content": "The harbour"}], "temperature": 0, "max_tokens": 8}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
REQUESTS = [
    ("completions", {**TEXT_BODY, "n": 2, "stop": ["."], "seed": 3}),
    ("completions", {**TEXT_BODY, "logprobs": 3, "top_k": 1, "min_p": 0.1}),
    ("completions", {**TEXT_BODY, "max_tokens": 0, "echo": True, "logprobs": 1}),
    ("completions", {**TEXT_BODY, "prompt": ["A lamp", "The harbour"]}),
    ("completions", {**TEXT_BODY, **STREAM}),
    ("chat", {**CHAT_BODY, "n": 2, "logprobs": True, "top_logprobs": 3, "stop": ["zz"], "seed": 1}),
    ("chat", {**CHAT_BODY, **STREAM}),
]
WRONG_BODIES = [
    ("completions", {**TEXT_BODY, "model": "other"}, ["NotFoundError", 404, "model_not_found"]),
    ("completions", {**TEXT_BODY, "temperature": -1}, ["BadRequestError", 400, None]),
    ("chat", {**CHAT_BODY, "messages": [{"role": "robot", "content": "a"}]}, ["BadRequestError", 400, None]),
]


def assert_holds(found, expected):
    """The client's object contains the HTTP answer, except fields that differ between answers."""
    if isinstance(expected, dict):
        for name in expected.keys() - {"id", "created"}:
            assert_holds(found[name], expected[name])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_holds(one, other)
    else:
        assert found == expected


@peer
@needs_openai
def test_openai_client_gets_plain_http_answers():
    with server(key="s3cret", seconds=0.002) as served:
        asked = json.dumps([*REQUESTS, *((kind, body) for kind, body, _ in WRONG_BODIES)])
        command = [OPENAI, TESTS / "oracles" / "openai_client.py", f"http://127.0.0.1:{served.port}", asked]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=100)
        assert ran.returncode == 0, ran.stderr
        wait_for(lambda: served.is_free)
        assert served.counted("cancelled") == 1 and served.counted("generated_tokens") < 1000
        said = json.loads(ran.stdout)
        for (kind, body), found in zip(REQUESTS, said["found"], strict=False):
            path = "/v1/completions" if kind == "completions" else "/v1/chat/completions"
            status, _, expected = served.ask(path, body, headers={"Authorization": "Bearer s3cret"})
            assert status == 200
            assert_holds(found, pieces(expected) if "stream" in body else expected)
    assert said["found"][len(REQUESTS) :] == [error for *_, error in WRONG_BODIES]
    assert said["wrong_key"] == ["AuthenticationError", 401, "invalid_api_key"] and said["models"] == ["sample"]
