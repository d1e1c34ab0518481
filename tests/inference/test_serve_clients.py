import json
import os
import subprocess

import numpy as np
import pytest
from distgpt.core.comm.api import SerialComm
from distgpt.core.train.assessment import Scorer
from distgpt.inference.evaluation.benchmark import Benchmark, likelihoods, read_questions
from peers import peer_with
from serving import pieces, sample, server

from conftest import TESTS, wait_for

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
        asked = json.dumps([*REQUESTS, *((kind, body) for kind, body, _ in WRONG)])
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
    assert said["found"][len(REQUESTS) :] == [error for *_, error in WRONG]
    assert said["wrong_key"] == ["AuthenticationError", 401, "invalid_api_key"] and said["models"] == ["sample"]
