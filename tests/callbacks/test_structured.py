"""JSON log lines, levels and ends; test_exporters.py has a whole run."""

import io
import json
import sys

import pytest
from distgpt.callbacks.structured import JsonLines, as_json
from distgpt.core.base.errors import StorageError
from distgpt.core.base.interrupts import Interrupted
from distgpt.core.comm import job

from conftest import inside


@pytest.fixture
def written(monkeypatch):
    def run(body, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(job, "ignore_further", lambda: None)  # signals of this test
        streams = [io.StringIO(), io.StringIO()]
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        try:
            with as_json():
                body()
        except BaseException as error:
            job.Job().leave(error, None)
        return [[json.loads(line) for line in stream.getvalue().splitlines()] for stream in streams]

    return run


def raising(error):
    def body():
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "code", "level"), [(StorageError("it is full"), 74, "error"), (Interrupted(10), 75, "warning")]
)
def test_json_end_has_exit_code(written, error, code, level):
    said, (end,) = written(raising(error))
    assert not said and (end["event"], end["level"], end["exit_code"]) == ("end", level, code)
    assert end["message"] == str(error)


def test_json_internal_error_has_traceback(written):
    said, (end, *trace) = written(raising(ValueError("x")))
    assert not said and end["exit_code"] == 70 and end["message"] == "rank 0: internal error"[8:]
    assert trace[0]["message"].startswith("Traceback") and trace[-1]["message"] == "ValueError: x"


def test_json_log_writes_whole_lines(written):
    def body():
        pieces, plain = [], sys.stdout.plain
        plain.write = lambda piece: (pieces.append(piece), type(plain).write(plain, piece))
        print("one\n\ntwo", end="")
        print("!", flush=True)
        assert len(pieces) == 2 and all(piece.endswith("}\n") for piece in pieces)  # ranks do not mix
        print("a note\x1b", file=sys.stderr)

    said, notes = written(body, SLURM_JOB_ID="7", SLURM_PROCID="3", SLURM_NTASKS="4", SLURM_STEP_ID="0")
    assert [each["message"] for each in said] == ["one", "two!"]  # rank 0 reports the end
    assert notes[0]["level"] == "warning" and notes[0]["message"] == "a note\x1b"
    assert {each["job"] for each in (*said, *notes)} == {"7"} and {each["rank"] for each in said} == {3}


def test_json_numbers_stay_numbers_and_nan_is_null(written):
    def body():
        lines = JsonLines(3600)
        lines.started({"first_step": 0, "steps": 9, **about})
        lines.stepped({"step": 1, "loss": float("nan"), "lr": 0.5, "time": 3.0})
        lines.stepped({"step": 2, "loss": 1.5})  # not yet
        lines.noted("two\nlines")
        lines.evaluated({"step": 2, "val_loss": 2.5})
        lines.sampled(2, " a text\n")

    about = {"parameters": 1, "vocabulary": 2, "corpus_tokens": 3, "held_out_tokens": 0, "ranks": 1}
    about |= {"stage": "serial", "threads": 2, "directory": "run"}
    (start, step, note, evaluation, sample, end), errors = written(body)
    assert not errors and start["parameters"] == 1 and "1 parameters" in start["message"]
    assert (step["step"], step["loss"], step["lr"]) == (1, None, 0.5) and step["time"].startswith("20")
    assert (note["step"], note["level"], note["message"]) == (2, "notice", "two\nlines")
    assert (evaluation["val_loss"], sample["message"]) == (2.5, "a text")
    assert (end["event"], end["exit_code"]) == ("end", 0)


def test_command_line_mistakes_are_json():
    done = inside("train", "--log-format", "json", "--steps", "many")
    told = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 2 and told[-1]["exit_code"] == 2 and "'many'" in told[-1]["message"]
    done = inside("train", "--log-format", "json", "--progress", "live")
    assert "cannot be combined" in json.loads(done.stderr)["message"]
