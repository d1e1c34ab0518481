"""The official openai client, in a Python of its own, against `distgpt serve`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from serving import server, until

ORACLE = Path(__file__).parents[1] / "oracles" / "openai_client.py"
LOOK = "from importlib.util import find_spec as f; raise SystemExit(not f('openai'))"
NAMED = ("DISTGPT_OPENAI_PYTHON", "DISTGPT_PEER_PYTHON")
PYTHONS = [sys.executable, *map(os.environ.get, NAMED)]
PEER = next((p for p in PYTHONS if p and not subprocess.run([p, "-c", LOOK]).returncode), None)

pytestmark = [
    pytest.mark.peer,
    pytest.mark.skipif(not PEER, reason=f"needs openai, here or in the Python that {NAMED[0]} names"),
]


@pytest.fixture(scope="module")
def met():
    """What the client got, and the server it got it from, once that is free again."""
    with server(key="s3cret", seconds=0.002) as found:
        address = f"http://127.0.0.1:{found.port}"
        ran = subprocess.run([PEER, ORACLE, address], capture_output=True, text=True, timeout=100)
        assert ran.returncode == 0, ran.stderr
        until(lambda: found.is_free)
        yield json.loads(ran.stdout), found


def expected(found, **settings):
    headers = {"Authorization": "Bearer s3cret"}
    body = {"prompt": "The harbour", "temperature": 0, **settings}
    return found.ask("/v1/completions", body, headers=headers)[2]["choices"]


def test_completions_streams_and_choices_are_understood(met):
    said, found = met
    (plain,) = expected(found, max_tokens=8)
    assert said["models"] == ["sample"] and said["texts"] == [plain["text"]] * 2
    assert said["usage"] == {"prompt_tokens": 11, "completion_tokens": 16, "total_tokens": 27}
    assert said["streamed"] == plain["text"] and said["reason"] == "length" and said["streamed_usage"] == 19
    assert plain["text"].startswith(said["extras"]) and len(said["extras"]) == 4
    assert said["batch"] == [choice["text"] for choice in expected(found, prompt=["A lamp", "The harbour"])]


def test_logprobs_are_understood(met):
    said, found = met
    (plain,) = expected(found, max_tokens=6, logprobs=3)
    assert said["tokens"] == plain["logprobs"]["tokens"] and said["top"] == plain["logprobs"]["top_logprobs"]
    assert said["offsets"] == list(range(6))
    (scored,) = expected(found, max_tokens=0, logprobs=1, echo=True)
    assert said["scored"] == scored["logprobs"]["token_logprobs"] and said["scored"][0] is None
    assert said["echoed"] == "The harbour" and len(said["scored"]) == 11 and max(said["scored"][1:]) < 0


def test_chats_are_understood(met):
    chat = met[0]["chat"]
    assert chat["role"] == "assistant" and chat["object"] == "chat.completion"
    assert chat["text"] == chat["streamed"] and len(chat["text"]) == 8 and chat["reason"] == "length"
    assert chat["usage"] == chat["streamed_usage"]
    assert chat["several"] == [chat["text"][:4]] * 2
    assert "".join(chat["tokens"]) == chat["text"][:4] and chat["top"] == [3] * 4
    assert chat["wrong"][:2] == ["BadRequestError", 400] and "'robot' is unknown" in chat["wrong"][3]


def test_errors_are_those_that_the_client_knows(met):
    said, _ = met
    assert said["wrong_key"][:3] == ["AuthenticationError", 401, "invalid_api_key"]
    assert said["wrong_model"][:3] == ["NotFoundError", 404, "model_not_found"]
    assert said["wrong_value"][:2] == ["BadRequestError", 400] and "temperature" in said["wrong_value"][3]


def test_a_stream_that_the_client_closes_is_cancelled(met):
    said, found = met
    assert said["cancelled"] == 3 and found.counted("cancelled") == 1
    assert found.counted("generated_tokens") < 1000
