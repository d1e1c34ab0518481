import http.client
import json
import re
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from distgpt.core.base.errors import DistgptError
from distgpt.core.base.files import bundled
from distgpt.core.comm.resources import peak_memory
from distgpt.corpora.tokenizers.bpe import BpeTokenizer, symbols
from distgpt.inference.serving import app
from distgpt.inference.serving import server as serving_module
from distgpt.inference.serving.server import bound
from hostiletokenizers import FAILING, TEXT, failing
from serving import JSON, POST, pieces, sample, server

from conftest import distgpt, inside, popen, refused, wait_for

MB = 1 << 20


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_large_body_is_rejected():
    with server() as found:
        found.complete("a", max_tokens=1)
        before = peak_memory()

        def chunks():
            for _ in range(100):
                yield b"x" * MB

        for how in ({"Content-Length": str(100 * MB)}, {}):  # {} sends chunks without a declared length
            connection = found.connect()
            connection.request("POST", "/v1/completions", chunks(), {**JSON, **how}, encode_chunked=not how)
            answer = connection.getresponse()
            assert answer.status == 413 and "1,048,576" in json.load(answer)["error"]["message"]
            assert answer.headers["connection"] == "close"
            connection.close()
        assert peak_memory() - before < 40 * MB
        with found.line(POST + b"Content-Length: 104857600\r\nExpect: 100-continue\r\n\r\n") as line:
            assert line.recv(1000).startswith(b"HTTP/1.1 413")
        assert found.complete("a", max_tokens=1)


def test_full_queue_returns_429():
    with server(slots=1, seconds=0.01, limits={"queue": 2}) as found:
        running, _ = found.begin("a", max_tokens=100)
        waiting = [found.connect() for _ in range(2)]
        for connection in waiting:
            connection.request("POST", "/v1/completions", json.dumps({"prompt": "b", "max_tokens": 1}), JSON)
        wait_for(lambda: found.gauge("open_requests") == 3)
        status, error, headers = found.refused(prompt="c")
        assert status == 429 and error["code"] == "queue_full" and headers["retry-after"] == "2"
        running.close()
        assert [connection.getresponse().status for connection in waiting] == [200, 200]
        assert found.complete("c", n=3, max_tokens=2)["usage"]["completion_tokens"] == 6
        status, error, _ = found.refused(prompt="c", n=4)
        assert status == 400 and "4 samples exceed the capacity of 3" in error["message"]


def test_answer_without_tokens_needs_no_slot():
    with server(slots=1, seconds=0.01) as found:
        connection, _ = found.begin("a", max_tokens=120)
        answer = found.complete(["b", "c"], max_tokens=0, n=2, echo=True)
        assert [each["text"] for each in answer["choices"]] == ["b", "b", "c", "c"]
        assert {each["finish_reason"] for each in answer["choices"]} == {"length"}
        assert found.gauge("running_sequences") == 1
        connection.close()


@pytest.mark.ci
def test_open_requests_share_a_limit():
    """The limit also counts prompts and log probabilities, which stay in memory until they are sent."""
    with server(seconds=0.005, limits={"everything": 1000}) as found:
        for much in ({"max_tokens": 900}, {"max_tokens": 90, "logprobs": 9}, {"prompt": "a" * 100, "n": 8}):
            body = {"max_tokens": 100, "overflow": "shift", "prompt": "a", **much}
            connection, _ = found.begin(**body)
            found.complete("b", max_tokens=10)
            status, _, headers = found.refused(max_tokens=120)
            assert status == 429 and "retry-after" in headers
            connection.close()
            wait_for(lambda: found.is_free)
            found.complete("b", max_tokens=120)
        status, error, _ = found.refused(max_tokens=60, logprobs=20)
        assert status == 400 and "1,000" in error["message"]


def test_body_with_two_lengths_is_rejected():
    """A proxy may use the other length and forward the rest as another client's request."""
    both = b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/models HTTP/1.1\r\n"
    with server() as found, found.line(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + both) as line:
        came = all_of(line)
        assert came.startswith("HTTP/1.1 400") and came.count("HTTP/1.1") == 1 and "must not have both" in came


@pytest.mark.parametrize("streams", [True, False])
def test_killed_client_frees_slots(streams):
    with server(slots=2, seconds=0.005) as found:
        body = json.dumps({"prompt": "a", "max_tokens": 4000, "overflow": "shift", "n": 4, "stream": streams})
        line = found.line(POST, body.encode())
        wait_for(lambda: found.gauge("running_sequences") == 2)
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # like a process that dies
        line.close()
        wait_for(lambda: found.is_free, 2)
        assert found.counted("cancelled") == 1 and found.counted("engine_failures") == 0
        assert found.complete("a", max_tokens=3, n=2)["usage"]["completion_tokens"] == 6


def narrow(found, **settings):
    """Request a stream of long pieces over small socket buffers."""
    found.serving.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 15)
    line = socket.socket()
    line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 13)
    line.settimeout(10)
    line.connect((found.host, found.port))
    body = json.dumps({"prompt": "a", "overflow": "shift", "logprobs": 20, "stream": True, **settings}).encode()
    line.sendall(POST + b"Connection: close\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    return line


def all_of(line, seconds=0.0):
    """Receive everything, with a pause after each piece."""
    came = b""
    with suppress(ConnectionResetError):
        while more := line.recv(1 << 14):
            came += more
            time.sleep(seconds)
    return came.decode()


def test_stalled_client_is_dropped(monkeypatch, capsys):
    monkeypatch.setattr(app, "TAKING", 0.5)
    monkeypatch.setattr(app, "SAYING", 0.1)
    with server(slots=2, seconds=0.001, limits={"max_tokens": 40_000}, log="requests") as found:
        with narrow(found, max_tokens=40_000):
            wait_for(lambda: found.gauge("running_sequences") == 1)
            assert found.complete("b", max_tokens=20)["usage"]["completion_tokens"] == 20
            wait_for(lambda: found.is_free)
            wait_for(lambda: not found.serving.server_state.connections)
        assert found.counted("cancelled") == 1 and found.counted("generated_tokens") < 20_000
    assert re.search(r" 200 .* tokens, the client read nothing for 0.5 s\n", capsys.readouterr().err)


def test_slow_client_gets_everything():
    """A timeout is reported after the unread pieces."""
    with server(slots=6) as found, ThreadPoolExecutor(1) as pool:
        reading = pool.submit(all_of, narrow(found, max_tokens=200, n=4), 0.004)
        assert found.complete("b", max_tokens=20)["usage"]["completion_tokens"] == 20
        text = reading.result()
        assert text.count("finish_reason") == 800 and "data: [DONE]" in text
        wait_for(lambda: found.is_free)
        assert found.counted("cancelled") == 0
    with server(limits={"seconds": 0.8, "max_tokens": 40_000}) as found:
        text = all_of(narrow(found, max_tokens=40_000), 0.004)
        assert '"code": "timeout"' in text.rpartition("data: ")[2] and "[DONE]" not in text
        wait_for(lambda: found.is_free)


def test_slow_request_times_out():
    with server(seconds=0.02, limits={"seconds": 0.5}) as found:
        begun = time.monotonic()
        status, error, _ = found.refused(prompt="a", max_tokens=110)
        assert status == 504 and error["code"] == "timeout" and time.monotonic() - begun < 2
        _, response = found.begin("a", max_tokens=110)
        text = response.read().decode()
        assert json.loads(text.split("data: ")[-1])["error"]["code"] == "timeout" and "[DONE]" not in text
        wait_for(lambda: found.is_free)


def test_idle_connection_is_closed(monkeypatch):
    monkeypatch.setattr(serving_module, "SILENT", 0.2)
    with server() as found:
        for first in (b"", b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"):
            with found.line(first) as line:
                assert not first or b" 200 " in line.recv(1000)
                line.sendall(b"GET / HT")
                begun = time.monotonic()
                all_of(line)
                assert time.monotonic() - begun < 3


def test_idle_connections_make_way():
    """Above the limit, the oldest idle connection is closed."""
    parts = (b"", b"GET / HT", POST, POST + b"Content-Length: 100\r\n\r\n{")
    with server(seconds=0.005, limits={"connections": 8}) as found:
        _, running = found.begin("a", max_tokens=100)
        lines = [found.line() for _ in range(40)]
        for number, line in enumerate(lines):
            with suppress(OSError):
                line.sendall(parts[number % 4])
        for _ in range(10):
            assert found.complete("b", max_tokens=1)
        wait_for(lambda: len(found.serving.server_state.connections) <= 8)
        assert len(pieces(running.read().decode().lstrip())) > 50
        for line in lines:
            line.close()


def test_connection_is_rejected_if_all_are_busy():
    with server(seconds=0.01, limits={"connections": 2}) as found:
        running = [found.begin("a", max_tokens=100)[1] for _ in range(2)]
        assert found.ask("/v1/completions", {"prompt": "b", "max_tokens": 1})[0] == 503
        assert all(each.read().endswith(b"[DONE]\n\n") for each in running) and found.complete("b", max_tokens=1)


def test_parser_queue_is_bounded(monkeypatch):
    may_end, parse = threading.Event(), app.COMPLETIONS["/v1/completions"]
    monkeypatch.setitem(app.COMPLETIONS, "/v1/completions", lambda *body: may_end.wait(20) and parse(*body))
    with server(limits={"body": 1 << 16}) as found, ThreadPoolExecutor(6) as pool:
        body = {"prompt": "a" * 60_000, "overflow": "shift", "max_tokens": 1}
        asked = [pool.submit(found.ask, "/v1/completions", body) for _ in range(6)]
        wait_for(lambda: sum(each.done() for each in asked) == 2)
        may_end.set()
        assert sorted(each.result()[0] for each in asked) == [400] * 4 + [429] * 2  # 400: a long prompt
        assert found.complete("a", max_tokens=1)


@pytest.mark.ci
def test_body_arrival_is_timed_without_parsing(monkeypatch):
    monkeypatch.setattr(app, "ARRIVING", 0.1)
    # Six million iterations take longer than the 0.1 s below on any machine.
    slow = "{% for i in range(6000) %}{% for j in range(1000) %}{% if i + j < 0 %}{% endif %}"
    slow += "{% endfor %}{% endfor %}a"
    chat = {"messages": [{"role": "user", "content": "b"}], "max_tokens": 1}
    with server(template=slow) as found:
        begun = time.monotonic()
        status, _, said = found.ask("/v1/chat/completions", chat)
        assert status == 200, said
        assert time.monotonic() - begun > 0.1
        with found.line(POST + b"Content-Length: 100\r\n\r\n{") as line:
            assert line.recv(1000).startswith(b"HTTP/1.1 408")
    with server(template=slow, limits={"seconds": 0.1}) as found:
        status, error, _ = found.refused("/v1/chat/completions", **chat)
        assert status == 504 and error["code"] == "timeout"


def test_prompt_is_decoded_once_off_the_event_loop(monkeypatch):
    kind, calls = type(sample()[1]), []
    behind = kind.streamer_behind

    def noted(self, prompt):
        calls.append((threading.current_thread().name, len(prompt)))
        return behind(self, prompt)

    monkeypatch.setattr(kind, "streamer_behind", noted)
    with server() as found:
        how = {"n": 8, "logprobs": 0, "max_tokens": 1, "overflow": "shift"}
        assert len(found.complete([97] * 1000, **how)["choices"]) == 8
    assert calls.count(("parser_0", 1000)) == 1 and {name for name, _ in calls} <= {"parser_0", "engine"}


def test_echo_counts_in_answer_size():
    echo = {"prompt": "a" * 1000, "echo": True, "max_tokens": 1, "overflow": "shift"}
    with server(slots=1, seconds=0.02, limits={"values": 1200, "everything": 4000}) as found:
        assert found.complete(**echo, n=4)["choices"][3]["text"].startswith("a" * 1000)
        status, error, _ = found.refused(**echo, n=5)
        assert status == 400 and "1,255 tokens" in error["message"]
        assert found.complete(**{**echo, "echo": False}, n=5)
        connections = []
        for _ in range(2):  # each with 1,000 of a prompt, 1,000 for four echoes, 4
            connections.append(found.connect())
            connections[-1].request("POST", "/v1/completions", json.dumps({**echo, "n": 4}), JSON)
        wait_for(lambda: found.ask("/v1/completions", {**echo, "n": 4})[0] == 429)
        assert [each.getresponse().status for each in connections].count(200) >= 1
        long = sample()[1].encode("a").tolist() * 5000
        status, error, _ = found.refused("/detokenize", tokens=long)
        assert status == 400 and "more than 4,800 characters" in error["message"]
        assert found.ask("/detokenize", {"tokens": long[:100]})[2] == {"prompt": "a" * 100}


CHAT = {"messages": [{"role": "user", "content": TEXT}]}
ASKED = {"/v1/completions": {"prompt": TEXT}, "/v1/chat/completions": CHAT, "/tokenize": {"prompt": TEXT}}


def test_long_tokens_count_multiple_times():
    with server(tokenizer=BpeTokenizer([*symbols(), "a" * 2048], [], None), limits={"values": 100}) as found:
        assert found.complete("a", max_tokens=25)
        for path in ("/v1/completions", "/v1/chat/completions"):
            status, error, _ = found.refused(path, **ASKED[path], max_tokens=26)
            assert status == 400 and "104 tokens and logprobs (each counts as 4" in error["message"]


@pytest.mark.parametrize("name", FAILING)
def test_tokenizer_failure_returns_400(name):
    with server(tokenizer=failing(name)) as found:
        for path, body in ASKED.items():
            status, error, _ = found.refused(path, **body)
            assert status == 400 and "cannot encode this text" in error["message"], path
        assert found.ask("/health")[0] == 200


def test_nonfinite_scores_fail_running_requests():
    with server(seconds=0.005) as found:
        _, response = found.begin("a", max_tokens=110)
        found.slots.spoil = 1
        text = response.read().decode()
        assert "not finite" in json.loads(text.split("data: ")[-1])["error"]["message"]
        found.slots.spoil = 1
        status, error, _ = found.refused(prompt="a")
        assert status == 500 and error["type"] == "server_error" and "not finite" in error["message"]
        assert found.complete("a", max_tokens=5, n=4)["usage"]["completion_tokens"] == 20
        assert found.counted("engine_failures") == 2
        wait_for(lambda: found.is_free)


def test_server_exits_without_an_engine():
    with server(seconds=0.005) as found:
        found.slots.count, found.slots.spoil = "none", 1  # breaks the construction of an engine
        status, error, _ = found.refused(prompt="a")
        assert status == 500 and "not finite" in error["message"]
        found.join()
        assert isinstance(found.ended, DistgptError) and "TypeError" in str(found.ended)


def started(log, *more):
    """Start a server process that logs to this file; return it and its port."""
    with log.open("wb") as out:
        process = popen("serve", "--port", "0", "--threads", "1", *more, stderr=out, stdout=out)

    def serving():
        assert process.poll() is None, log.read_text()
        return re.search(r"serving sample.*http://127.0.0.1:(\d+)", log.read_text())

    return process, int(wait_for(serving, 60)[1])


def ask(port, stream, **settings):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    body = json.dumps({"prompt": "a", "stream": stream, "temperature": 0, **settings})
    connection.request("POST", "/v1/completions", body, JSON)
    return connection.getresponse()


@pytest.mark.ci
@pytest.mark.smoke
def test_sigterm_finishes_running_requests(tmp_path):
    process, port = started(log := tmp_path / "log", "--max-tokens", "100000")
    running = ask(port, True, max_tokens=3000, overflow="shift")
    first = running.readline()
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: "finishing active requests" in log.read_text())
    with pytest.raises(ConnectionError):  # rejected, or reset while the listener closes
        ask(port, False)
    made = pieces((first + running.read()).decode())
    assert made[-1]["choices"][0]["finish_reason"] == "length" and process.wait(20) == 0
    assert "Traceback" not in log.read_text()


@pytest.mark.ci
def test_second_signal_exits_immediately(tmp_path):
    process, port = started(log := tmp_path / "log", "--max-tokens", "10000000")
    running = ask(port, True, max_tokens=1_000_000, overflow="slide")
    assert running.readline()
    process.send_signal(signal.SIGINT)
    wait_for(lambda: "finishing active requests" in log.read_text())
    process.send_signal(signal.SIGINT)
    assert process.wait(20) == 130
    assert re.findall("^distgpt: .*", log.read_text(), re.MULTILINE) == ["distgpt: interrupted"]


def test_serve_command_rejects_invalid_options(tmp_path):
    with bound("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        for words, code, *said in (
            (["--weights", tmp_path / "none"], 74, "none"),
            (["--api-key", "a b"], 2, "API key"),
            (["--proxy", "x.example"], 2, "--proxy: 'x.example'"),
            (["--max-samples", 0], 2, "--max-samples"),
            (["--weights", bundled("weights", "sample.safetensors"), "--port", port], 2, "cannot listen on 127", port),
        ):
            refused(inside("serve", *map(str, words)), code, *said)


@pytest.mark.ci
def test_missing_starlette_is_named(tmp_path):
    (tmp_path / "starlette.py").write_text("raise ImportError('not here')")
    refused(distgpt("serve", env={"PYTHONPATH": str(tmp_path)}), 2, "Starlette", "pip install 'distgpt[serve]'")


def crowd(found, clients, seconds):
    """Run concurrent clients; every fifth request disconnects early. Return each request's outcome."""
    until_when, ended = time.monotonic() + seconds, []

    def one(number):
        for turn in count(1):
            if time.monotonic() > until_when:
                return
            how = {"max_tokens": 1 + (number * 7 + turn) % 40, "n": 1 + turn % 2, "seed": number}
            if (number + turn) % 5 == 0:
                found.begin("The harbour", max_tokens=100)[0].close()
                ended.append("left")
            elif number % 2:
                text = found.ask("/v1/completions", {"prompt": "The harbour", "stream": True, **how})[2]
                ended.append(sum(bool(part["choices"][0]["finish_reason"]) for part in pieces(text)) == how["n"])
            else:
                used = found.complete("The harbour", **how)["usage"]["completion_tokens"]
                ended.append(used == how["max_tokens"] * how["n"])

    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(one, range(clients)))
    return ended


def test_concurrent_clients_lose_nothing():
    with server(slots=16, limits={"queue": 1000}) as found:
        crowd(found, 64, 0.5)
        wait_for(lambda: found.is_free)
        before, threads = resident(), threading.active_count()
        ended = crowd(found, 64, 1.5)
        wait_for(lambda: found.is_free)
        assert len(ended) > 100 and set(ended) == {True, "left"} and resident() - before < 16 * MB
        assert threading.active_count() <= threads
        found.slots.most = 0
        assert found.complete("a", max_tokens=3, n=16) and found.slots.most == 16  # no slot is lost
        assert found.counted("engine_failures") == 0
        (requests,) = (each for each in found.runner.metrics.registry.collect() if each.name == "distgpt_requests")
        assert {sample.labels["status"] for sample in requests.samples} <= {"200", "499"}
        wait_for(lambda: not found.serving.server_state.connections)
