"""`distgpt serve`: OpenAI's completions against the engine itself; errors; keys, hosts, origins; metrics."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from random import Random

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from distgpt.core.base.errors import UsageError
from distgpt.core.data.tokenizers import ByteTokenizer
from distgpt.core.generate.engine import Engine, complete
from distgpt.core.generate.engine_setup import slots_for
from distgpt.core.generate.request import Request
from distgpt.core.generate.sample import default_prompt
from distgpt.inference.serving.answers import Served
from distgpt.inference.serving.completions import PARAMETERS, parse_body
from distgpt.inference.serving.limits import Limits, Refusal
from distgpt.inference.serving.server import checked_key
from serving import JSON, pieces, sample, server

HOT = {"temperature": 0.9, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1, "seed": 7}


@pytest.fixture(scope="module")
def served():
    with server() as found:
        yield found


def directly(prompt, **settings):
    """What the engine itself makes of a prompt."""
    model, tokenizer = sample()
    tokens = tokenizer.encode(prompt).tolist() if isinstance(prompt, str) else prompt
    return complete(Engine(slots_for(model, 2), tokenizer), [Request(tokens, **settings)])[0]


def test_a_completion_is_what_the_engine_makes_of_it(served):
    found = served.complete("The harbour", max_tokens=30, n=3, **HOT)
    expected = directly("The harbour", max_new_tokens=30, n=3, **HOT, overflow="stop")
    assert [choice["text"] for choice in found["choices"]] == [sample.text for sample in expected]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2]
    assert {choice["finish_reason"] for choice in found["choices"]} == {"length"}
    assert {choice["logprobs"] for choice in found["choices"]} == {None}
    assert found["usage"] == {"prompt_tokens": 11, "completion_tokens": 90, "total_tokens": 101}
    assert found["object"] == "text_completion" and found["model"] == "sample"
    assert found["id"].startswith("cmpl-")
    assert len({choice["text"] for choice in found["choices"]}) == 3


def test_a_stream_says_the_same_piece_by_piece(served):
    settings = {"max_tokens": 25, "n": 2, "logprobs": 3, "echo": False, **HOT}
    whole = served.complete(["The harbour", "A lamp"], **settings)
    body = {"prompt": ["The harbour", "A lamp"], "stream": True, "stream_options": {"include_usage": True}}
    status, headers, text = served.ask("/v1/completions", {**body, **settings})
    assert status == 200 and headers["content-type"] == "text/event-stream"
    *parts, last = pieces(text)
    assert last["choices"] == [] and last["usage"] == whole["usage"]
    assert len(parts) == 100 and {part["usage"] for part in parts} == {None}
    for choice in whole["choices"]:
        mine = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert [part["finish_reason"] for part in mine] == [None] * 24 + ["length"]
        for name, values in choice["logprobs"].items():
            assert [value for part in mine for value in part["logprobs"][name]] == values, name


def test_logprobs_name_the_chosen_token_beside_the_likeliest(served):
    how = {"max_tokens": 40, "logprobs": 1, "temperature": 3, "seed": 1}
    said = served.complete("The harbour", **how)["choices"][0]["logprobs"]
    assert {len(top) for top in said["top_logprobs"]} == {1, 2}
    assert all(token in top for token, top in zip(said["tokens"], said["top_logprobs"], strict=True))


def test_echo_with_logprobs_scores_the_prompt_s_own_tokens(served):
    """As evaluation harnesses ask for it: with one token more or none, with the prompt as text or tokens."""
    tokens = sample()[1].encode("The harbour").tolist()
    wanted = {"echo": True, "logprobs": 2, "temperature": 0}
    for new, prompt in ((0, "The harbour"), (1, tokens), (9, "The harbour")):
        (expected,) = directly(prompt, max_new_tokens=new, logprobs=2, prompt_logprobs=True)
        (found,) = served.complete(prompt, max_tokens=new, **wanted)["choices"]
        assert found["text"] == "The harbour" + expected.text and found["finish_reason"] == "length"
        said, scored = found["logprobs"], [*expected.prompt_likelihoods[1:], *(expected.likelihoods or ())]
        assert said["token_logprobs"] == [None, *(each.logprob for each in scored)]
        assert said["top_logprobs"][0] is None and len(said["top_logprobs"]) == 11 + new
        for token, top, own in zip(said["tokens"][1:], said["top_logprobs"][1:], scored, strict=True):
            assert top[token] == own.logprob
            assert max(top.values()) == own.alternatives[0][1] and len(top) in (2, 3)
        for token, offset in zip(said["tokens"], said["text_offset"], strict=True):
            assert found["text"][offset : offset + len(token)] == token
        body = {"prompt": prompt, "max_tokens": new, "stream": True, **wanted}
        parts = [part["choices"][0] for part in pieces(served.ask("/v1/completions", body)[2])]
        assert "".join(part["text"] for part in parts) == found["text"]
        for name, values in said.items():
            assert [value for part in parts for value in (part["logprobs"] or said)[name]] == values, name
    several = served.complete(["A lamp", "The harbour"], max_tokens=0, n=2, **wanted)
    assert [choice["text"] for choice in several["choices"]] == ["A lamp"] * 2 + ["The harbour"] * 2
    assert several["choices"][2]["logprobs"] == several["choices"][3]["logprobs"]
    assert several["choices"][3]["logprobs"]["token_logprobs"] == said["token_logprobs"][:11]
    assert several["usage"]["completion_tokens"] == 0


def test_prompts_are_texts_tokens_lists_of_both_or_nothing(served):
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


def test_an_answer_does_not_wait_for_an_acknowledgement(served):
    """Which clients delay by 40 ms, so that no more than 25 small requests a second would pass."""
    connection, seconds = served.connect(), []
    for _ in range(60):
        begun = time.perf_counter()
        connection.request("POST", "/v1/completions", b'{"prompt": "a", "max_tokens": 1}', JSON)
        assert connection.getresponse().read()
        seconds.append(time.perf_counter() - begun)
    connection.close()
    assert sorted(seconds[30:])[5] < 0.03  # the first are acknowledged at once


def test_the_separator_ends_a_completion_unless_it_is_to_be_ignored():
    """As a model that has one ends a document by it."""
    about = Served("it", ByteTokenizer(), 256, 64, 0)
    about.tokenizer.separator = 65
    (request,) = parse_body(b'{"prompt": "a", "stop": "b"}', about, Limits()).requests
    assert request.stop == ("b",) and request.ends == (65,)
    (request,) = parse_body(b'{"prompt": "a", "ignore_eos": true}', about, Limits()).requests
    assert request.ends == ()


def test_past_the_context_a_completion_ends_unless_it_may_go_on(served):
    (found,) = served.complete("The harbour", max_tokens=200)["choices"]
    assert found["finish_reason"] == "length"
    assert served.complete("x" * 100, max_tokens=100)["usage"]["completion_tokens"] == 29
    assert served.complete("x" * 100, max_tokens=60, overflow="shift")["usage"]["completion_tokens"] == 60
    long = {"prompt": "x" * 300, "max_tokens": 5}
    status, _, said = served.ask("/v1/completions", long)
    assert status == 400 and said["error"]["code"] == "context_length_exceeded"
    assert "128" in said["error"]["message"] and "300" in said["error"]["message"]
    assert served.complete(**long, overflow="shift", temperature=0)["usage"]["prompt_tokens"] == 300


def test_seeds_make_sampling_repeatable_whoever_shares_the_batch(served):
    """And without one no two completions are alike."""

    def text(seed):
        more = {} if seed is None else {"seed": seed}
        return served.complete("The harbour", max_tokens=40, **more)["choices"][0]["text"]

    alone = [text(seed) for seed in range(-3, 5)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(text, range(-3, 5))) == alone
    assert len(set(alone)) == 8
    assert text(None) != text(None)


WRONG = [
    (b"", 400, "JSON"),
    (b"[1]", 400, "object"),
    (b"\xff{}", 400, "UTF-8"),
    (b'{"prompt": "a", "prompt": "b"}', 400, "twice"),
    (b'{"temperature": NaN}', 400, "NaN"),
    (b'{"prompt": "\\ud800"}', 400, "UTF-8"),
    (b"[" * 100_000, 400, "deep"),
    ({"prompt": ""}, 400, "empty"),
    ({"prompt": ["a", 1]}, 400, "mixes"),
    ({"prompt": [256]}, 400, "256"),
    ({"prompt": ["a"] * 65, "n": 2}, 400, "samples"),
    ({"max_tokens": 4096, "n": 128, "logprobs": 2}, 400, "1,048,576"),
    ({"max_tokens": -1}, 400, "max_tokens"),
    ({"max_tokens": 5000}, 400, "at most 4096"),
    ({"temperature": -1}, 400, "temperature"),
    ({"prompt": "a" * 300, "logprobs": 1, "echo": True, "overflow": "shift"}, 400, "leave out logprobs"),
    ({"prompt": ["a" * 100] * 128, "max_tokens": 400, "logprobs": 20, "echo": True}, 400, "1,347,200"),
    ({"stop": "a" * 300}, 400, "stop"),
    ({"stream": "yes"}, 400, "stream"),
    ({"overflow": "wrap"}, 400, "overflow"),
    ({"best_of": 3}, 400, "best_of"),
    ({"max_token": 3}, 400, "did you mean 'max_tokens'"),
    ({"model": "gpt-5"}, 404, "gpt-5"),
]


@pytest.mark.parametrize(("body", "status", "word"), WRONG)
def test_what_makes_no_sense_is_refused_in_openais_shape(served, body, status, word):
    found, _, said = served.ask("/v1/completions", body if isinstance(body, bytes) else {"prompt": "a", **body})
    assert found == status and set(said) == {"error"}, said
    assert set(said["error"]) == {"message", "type", "param", "code"}
    assert said["error"]["type"] == "invalid_request_error" and word in said["error"]["message"]


def test_whatever_comes_is_understood_or_refused():
    """Bodies with values of others, and with bytes changed, cut out and doubled."""
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


def test_the_models_are_listed(served):
    status, _, found = served.ask("/v1/models")
    assert status == 200 and [model["id"] for model in found["data"]] == ["sample"]
    assert served.ask("/v1/models/sample")[2] == found["data"][0]
    status, _, said = served.ask("/v1/models/other/one")
    assert status == 404 and said["error"]["code"] == "model_not_found"
    assert served.ask("/health")[2] == {"status": "ok"}


def test_what_there_is_not(served):
    for path, status in (("/nothing", 404), ("/v1/completions", 405)):
        found, headers, said = served.ask(path, method="GET")
        assert found == status and path in said["error"]["message"]
    assert headers["allow"] == "POST"


def test_the_page_may_run_what_is_in_it_and_nothing_else(served):
    status, headers, text = served.ask("/")
    policy = headers["content-security-policy"]
    assert status == 200 and policy.startswith("default-src 'none'") and "; script-src 'sha256-" in policy
    assert "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert not re.search(r"""(src|href)=["']?(https?:)?//|@import|url\(|\son\w+=|\sstyle=""", text)


def test_pages_of_other_sites_cannot_ask(served):
    """Neither by a request that browsers send unasked, nor by a name of theirs that leads here."""
    status, headers, _ = served.ask("/v1/completions", b"{}", headers={"Content-Type": "text/plain"})
    assert status == 415 and "access-control-allow-origin" not in headers
    asking = {"Origin": "https://example.org", "Access-Control-Request-Method": "POST"}
    status, headers, _ = served.ask("/v1/completions", method="OPTIONS", headers=asking)
    assert status == 405 and "access-control-allow-origin" not in headers
    for path in ("/", "/v1/models", "/metrics"):
        assert served.ask(path, headers={"Host": f"evil.example:{served.port}"})[0] == 403
        assert served.ask(path, headers={"Host": f"localhost:{served.port}"})[0] == 200


def test_a_site_may_be_let_in():
    with server(origins=("https://example.org",)) as found:
        asking = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}
        for origin, status in (("https://example.org", 200), ("https://example.com", 400)):
            answer, headers, _ = found.ask("/v1/completions", method="OPTIONS", headers={"Origin": origin, **asking})
            assert answer == status
            assert headers.get("access-control-allow-origin") == (origin if status == 200 else None)


def test_a_key_is_asked_for(capsys):
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


def test_metrics_count_what_happened():
    with server() as found:
        found.complete("The harbour", max_tokens=10, n=2)
        found.ask("/v1/completions", b"{")
        status, headers, text = found.ask("/metrics")
    assert status == 200 and headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    values = {name: float(value) for name, value in samples}
    assert [values[f'distgpt_requests_total{{status="{status}"}}'] for status in (200, 400)] == [1, 1]
    assert values["distgpt_prompt_tokens_total"] == 11 and values["distgpt_generated_tokens_total"] == 20
    assert values["distgpt_lanes"] == 4
    for gauge in ("queue_length", "running_sequences", "open_requests"):
        assert values[f"distgpt_{gauge}"] == 0
    for name in ("first_token_seconds", "request_seconds"):
        buckets = [values[key] for key in values if key.startswith(f"distgpt_{name}_bucket")]
        assert buckets == sorted(buckets) and buckets[-1] == values[f"distgpt_{name}_count"] == 1
        assert 0 < values[f"distgpt_{name}_sum"] < 20
    declared = re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE)
    assert len(declared) == len(set(declared)) and text.endswith("\n") and "_created" not in text


def test_the_log_believes_a_proxy_that_it_was_told_of_and_nobody_else(capsys):
    for proxies, who in (((), "127.0.0.1"), (("10.0.0.2",), "127.0.0.1"), (("127.0.0.0/8",), "9.9.9.9")):
        with server(log="requests", proxies=proxies) as found:
            found.ask("/health", headers={"X-Forwarded-For": "9.9.9.9"})
        assert f" {who} GET /health 200" in capsys.readouterr().err


def test_a_log_line_says_who_asked_what_but_not_the_prompt(capsys):
    for log in ("requests", "prompts"):
        with server(log=log) as found:
            found.complete("The \x1b[2Jharbour", max_tokens=3)
            found.ask("/v1/%1b[2J")
        said = capsys.readouterr().err
        lines = [line for line in said.splitlines() if " 127.0.0.1 " in line]
        assert "\x1b" not in said and len(lines) == 2
        assert re.search(r"POST /v1/completions 200 \d\.\d{3} s, 15 \+ 3 tokens", lines[0])
        assert ("harbour" in lines[0]) == (log == "prompts")
        assert r"GET /v1/\x1b[2J 404" in lines[1]
