"""The official openai client, in a Python of its own: it gets from `distgpt serve` what plain HTTP gives."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from serving import pieces, server

from conftest import wait_for

ORACLE = Path(__file__).parents[1] / "oracles" / "openai_client.py"
LOOK = "from importlib.util import find_spec as f; raise SystemExit(not f('openai'))"
NAMED = ("DISTGPT_OPENAI_PYTHON", "DISTGPT_PEER_PYTHON")
PYTHONS = [sys.executable, *map(os.environ.get, NAMED)]
PEER = next((p for p in PYTHONS if p and not subprocess.run([p, "-c", LOOK]).returncode), None)

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not PEER, reason=f"needs openai, here or in the Python that {NAMED[0]} names"),
]

TEXT = {"prompt": "The harbour", "temperature": 0, "max_tokens": 8}
CHAT = {"messages": [{"role": "user", "content": "The harbour"}], "temperature": 0, "max_tokens": 8}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
REQUESTS = [
    ("completions", {**TEXT, "n": 2, "stop": ["."], "seed": 3}),
    ("completions", {**TEXT, "logprobs": 3, "top_k": 1, "min_p": 0.1}),
    ("completions", {**TEXT, "max_tokens": 0, "echo": True, "logprobs": 1}),
    ("completions", {**TEXT, "prompt": ["A lamp", "The harbour"]}),
    ("completions", {**TEXT, **STREAM}),
    ("chat", {**CHAT, "n": 2, "logprobs": True, "top_logprobs": 3, "stop": ["zz"], "seed": 1}),
    ("chat", {**CHAT, **STREAM}),
]
WRONG = [
    ("completions", {**TEXT, "model": "other"}, ["NotFoundError", 404, "model_not_found"]),
    ("completions", {**TEXT, "temperature": -1}, ["BadRequestError", 400, None]),
    ("chat", {**CHAT, "messages": [{"role": "robot", "content": "a"}]}, ["BadRequestError", 400, None]),
]


def assert_holds(found, expected):
    """All that HTTP gave is in what the client made of it, but for what differs from one answer to the next."""
    if isinstance(expected, dict):
        for name in expected.keys() - {"id", "created"}:
            assert_holds(found[name], expected[name])
    elif isinstance(expected, list):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_holds(one, other)
    else:
        assert found == expected


def test_the_client_gets_what_plain_http_gives():
    with server(key="s3cret", seconds=0.002) as served:
        asked = json.dumps([*REQUESTS, *((kind, body) for kind, body, _ in WRONG)])
        command = [PEER, ORACLE, f"http://127.0.0.1:{served.port}", asked]
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
    assert said["found"][len(REQUESTS) :] == [error for *_, error in WRONG]
    assert said["wrong_key"] == ["AuthenticationError", 401, "invalid_api_key"] and said["models"] == ["sample"]
