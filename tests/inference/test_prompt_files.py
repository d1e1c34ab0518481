import fcntl
import json

import numpy as np
import pytest
from decoding import model, plain_scores, varied_requests
from distgpt import api
from distgpt.core.base.errors import NonFiniteError
from distgpt.core.generate.engine import Engine, complete
from distgpt.core.generate.plain_slots import PlainSlots
from distgpt.core.generate.request import Request
from distgpt.core.generate.slots import on_ranks
from distgpt.inference.generation.batch import Answers, distribute
from threadranks import on_all_ranks

from conftest import distgpt, inside, needs_mpi, refused

LINES = [
    {"prompt": "the lamp", "max_new_tokens": 3},
    {"prompt": "the", "temperature": 0.9, "seed": 4, "n": 2, "logprobs": 2},
    {"prompt": "the keeper of the", "temperature": 1, "top_k": 5, "top_p": 0.9, "min_p": 0.01},
    {"prompt": "the", "repetition_penalty": 1.5, "stop": ["the", "and"]},
    {"prompt": "the", "stop": "the", "max_new_tokens": 0},
]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def infer(trained, tmp_path):
    def run(*args):
        words = ("infer", "--threads", "1", "--weights", trained / "weights.safetensors", *args)
        return inside(*words, cwd=tmp_path)

    return run


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_prompt_file_matches_single_prompts(infer, tmp_path):
    write(tmp_path / "p", LINES)
    flags = ("--max-new-tokens", "12", "--overflow", "shift")
    result = infer("--prompts", "p", "--out", "o", *flags)
    assert result.returncode == 0 and "5 prompts, " in result.stderr, result.stderr
    for number, (asked, found) in enumerate(zip(LINES, read(tmp_path / "o"), strict=True), 1):
        assert (found["line"], found["prompt"]) == (number, asked["prompt"])
        words = []
        for name, value in asked.items():
            for each in value if isinstance(value, list) else [value]:
                words += [f"--{name.replace('_', '-')}", str(each)]
        alone = json.loads(infer(*flags, *words, "--json").stdout)
        keys = ("text", "tokens", "reason", "logprobs", "alternatives")
        choices = alone.get("choices", [{key: alone[key] for key in keys if key in alone}])
        for one, other in zip(found["choices"], choices, strict=True):
            assert {**one, "logprobs": 0} == {**other, "logprobs": 0}
            assert one.get("logprobs", []) == pytest.approx(other.get("logprobs", []))


def test_resumed_prompt_file_keeps_answers(infer, tmp_path):
    lines = [{"prompt": "the", "max_new_tokens": 1 + i % 5, "temperature": 1, "seed": i} for i in range(16)]
    write(tmp_path / "p", lines)
    assert infer("--prompts", "p", "--out", "whole").returncode == 0
    whole = (tmp_path / "whole").read_bytes()
    assert [answer["line"] for answer in read(tmp_path / "whole")] == list(range(1, 17))
    kept = whole.splitlines(keepends=True)
    kept[2] = kept[2].replace(b'"text": "', b'"text": "kept ')
    out = tmp_path / "o"
    few, others = (kept[:7], b'{"line": 9, "request": "ab'), (kept[10:14] + kept[2:4], b'{"li')
    for left, half in (few, others, (kept, b"")):
        out.write_bytes(b"".join(left) + half)
        result = infer("--prompts", "p", "--out", "o")
        assert result.returncode == 0 and f"{16 - len(left)} prompt" in result.stderr
        pairs = zip(kept, whole.splitlines(keepends=True), strict=True)
        assert out.read_bytes() == b"".join(mine if mine in left else theirs for mine, theirs in pairs)


def test_interrupted_prompt_file_keeps_finished_answers(infer, tmp_path, monkeypatch):
    write(tmp_path / "p", [{"prompt": "the", "max_new_tokens": 1 + 3 * i} for i in range(9)])
    add, kept = Answers.add, []

    def once(self, answers):
        if kept:
            raise KeyboardInterrupt
        add(self, answers)
        kept.extend(prompt.line for prompt, _ in answers)

    monkeypatch.setattr(Answers, "add", once)
    assert infer("--prompts", "p", "--out", "o").returncode == 130
    assert [answer["line"] for answer in read(tmp_path / "o")] == kept != []


WRONG = {
    '{"prompt": "the", "temperatur": 1}': "did you mean 'temperature'",
    '{"prompt": "the", "lookup": 1}': "unknown setting 'lookup'",
    '{"prompt": "zeppelin"}': "zeppelin",
    '{"text": "the"}': 'no string "prompt"',
    '["the"]': "not a JSON object",
    '{"prompt": "the"': "line 2",
    '{"prompt": "the", "n": 1, "n": 2}': "duplicate",
}


def test_invalid_line_is_rejected_before_computing(infer, tmp_path):
    for line, words in WRONG.items():
        (tmp_path / "p").write_text('{"prompt": "the"}\n' + line + "\n")
        refused(infer("--prompts", "p", "--out", "o"), 65, "p, line 2", words)
        assert not (tmp_path / "o").exists()


def test_mismatched_requests_and_files_are_rejected(infer, trained, tmp_path):
    write(tmp_path / "p", LINES)
    assert infer("--prompts", "p", "--out", "o").returncode == 0
    before = (tmp_path / "o").read_bytes()
    model = api.load(trained / "weights.safetensors")
    model.parameters()["wte"][0, 0] += 0.25
    model.save(tmp_path / "altered")
    (tmp_path / "notes").write_text("my notes")
    (tmp_path / "twice").write_bytes(before + before.splitlines(True)[0])
    (tmp_path / "empty").write_text("\n\n")
    write(tmp_path / "long", [{"prompt": "the"}, {"prompt": "the lamp " * 30}])
    for words, code, *said in (
        ("p o --max-new-tokens 7", 2, "o, line 2", "other settings"),
        ("p o --dtype int8", 2, "o, line 1", "another model"),
        ("p o --weights altered", 2, "o, line 1", "another model"),
        ("p notes", 65, "notes, line 1", "not an answer"),
        ("p twice", 65, "twice, line 6", "line 1"),
        ("p no/o", 74, "no/o"),
        ("p .", 74, "directory"),
        ("nothing x", 74, "nothing"),
        ("empty x", 65, "has no prompts"),
        ("long x --overflow stop", 65, "long, line 2", "60 tokens", "context"),
        ("p x --lookup 65", 2, "lookup must"),
    ):
        prompts, out, *more = words.split()
        refused(infer("--prompts", prompts, "--out", out, *more), code, *said)
    for words in (["--prompts", "p"], ["--out", "o"], ["--prompts", "p", "--out", "x", "--json"]):
        assert infer(*words).returncode == 2
    assert (tmp_path / "notes").read_text() == "my notes" and (tmp_path / "o").read_bytes() == before
    assert not (tmp_path / "x").exists()


def test_second_writer_is_rejected(infer, tmp_path):
    write(tmp_path / "p", LINES)
    with (tmp_path / "o").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        refused(infer("--prompts", "p", "--out", "o"), 2, "another process is writing o")


def test_ranks_share_requests():
    one, requests, found = model(seq_len=24), varied_requests(7), {}
    expected = complete(Engine(PlainSlots(one, 4), chunk=4), requests)

    def work(comm):
        engine = Engine(PlainSlots(model(seq_len=24), 2), chunk=4)
        for answers in distribute(comm, engine, requests if comm.rank == 0 else [], 4):
            found.update(answers)

    on_all_ranks(3, work)
    assert [found[i] for i in range(7)] == expected


def test_averaged_slots_follow_rank_0():
    """The ranks have different weights; rank 0 returns the mean of their scores."""
    models = [model(), model()]
    models[1].params["wte"][...] *= 1.1
    request = Request([1, 2, 3], 6, temperature=1.0, seed=2, n=2, overflow="shift", logprobs=0)

    def work(comm):
        lanes = PlainSlots(models[comm.rank], 2)
        return on_ranks(lanes, comm, lambda lanes: complete(Engine(lanes), [request]))

    (samples,), nothing = on_all_ranks(2, work)
    assert nothing is None
    for sample in samples:
        seen = [1, 2, 3]
        for token, (logprob, _) in zip(sample.tokens, sample.likelihoods, strict=True):
            scores = np.mean([plain_scores(each, seen)[-1] for each in models], axis=0)
            assert logprob == pytest.approx(scores[token] - np.log(np.exp(scores).sum()))
            seen.append(token)
    models[1].params["wte"][...] = np.nan

    def failing(comm):
        with pytest.raises(NonFiniteError) as caught:
            work(comm)
        return caught.value.shared

    assert on_all_ranks(2, failing) == [True, True]


@pytest.mark.ranks
@pytest.mark.slow
@needs_mpi
def test_ranks_write_answers_in_prompt_order(infer, trained, tmp_path):
    write(tmp_path / "p", LINES * 3)
    words = [
        *["infer", "--threads", "1", "--stage", "mpi", "--prompts", "p", "--weights"],
        trained / "weights.safetensors",
    ]
    two = distgpt(*words, "--out", "two", ranks=2, cwd=tmp_path)
    assert two.returncode == 0 and two.stderr.count("15 prompts, ") == 1, two.stderr
    assert infer("--prompts", "p", "--out", "one").returncode == 0
    assert (tmp_path / "two").read_bytes() == (tmp_path / "one").read_bytes()
    (tmp_path / "p").write_text('{"prompt": 3}\n')
    refused(distgpt(*words, "--out", "x", ranks=2, cwd=tmp_path), 65, "p, line 1")
