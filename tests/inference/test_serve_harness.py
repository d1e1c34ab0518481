"""Requests of evaluation harnesses: the same scores as `distgpt eval` has."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from distgpt.core.comm.api import SerialComm
from distgpt.core.train.assessment import Scorer
from distgpt.inference.evaluation.benchmark import Benchmark, likelihoods, read_questions
from serving import sample, server

LOOK = "from importlib.util import find_spec as f; raise SystemExit(not f('lm_eval'))"
NAMED = "DISTGPT_LMEVAL_PYTHON"
PYTHONS = [sys.executable, os.environ.get(NAMED)]
LM_EVAL = next((p for p in PYTHONS if p and not subprocess.run([p, "-c", LOOK]).returncode), None)

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
    """A file as ARC's, and what `eval` finds in it."""
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


def test_a_harness_finds_the_likelihoods_of_eval(tmp_path):
    _, benchmark, scorer = questions(tmp_path)
    spans = benchmark.spans[:12]
    body = {"prompt": [span.ids.tolist() for span in spans], "temperature": 0, "seed": 1234}
    with server() as found:
        body |= {"max_tokens": 1, "logprobs": 1, "echo": True}  # as lm-eval asks
        choices = found.ask("/v1/completions", body)[2]["choices"]
    for choice, span, (loss, greedy) in zip(choices, spans, likelihoods(scorer, spans), strict=True):
        known = {name: choice["logprobs"][name][span.first : -1] for name in ("token_logprobs", "top_logprobs")}
        assert sum(known["token_logprobs"]) == pytest.approx(-loss, abs=1e-4)
        best = [max(top.values()) for top in known["top_logprobs"]]
        assert greedy == (known["token_logprobs"] == best)


@pytest.mark.peer
@pytest.mark.skipif(not LM_EVAL, reason=f"needs lm-eval, here or in the Python that {NAMED} names")
def test_lm_eval_runs_against_it_and_finds_what_eval_does(tmp_path):
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
