"""Records and results made to hurt: what is read is checked, and what is broken is left out and said."""

import json

import pytest

from distgpt.errors import DataError
from distgpt.measure import jobs
from distgpt.measure.compare.page import visible
from distgpt.show.plot import read_runs

ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e"


@pytest.mark.parametrize("line", [
    '{"step": true, "loss": 1.0}', '{"step": 1.5, "loss": 1.0}', '{"step": "1", "loss": 1.0}', '{"step": -1}',
    '{"step": 1, "loss": "2.0"}', '{"step": 1, "loss": true}', '{"step": 1, "loss": NaN}', '{"step": 1e400}',
    '{"step": 1, "step": 2}', "[]", "1", '{"step": null}', '{"loss": 1.0}', "[" * 5000 + "]" * 5000,
])  # fmt: skip
def test_metrics_are_numbers_by_name(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 3.0}\n' + line + "\n")
    with pytest.raises(DataError, match="line 2"):
        read_runs([tmp_path])
    if '"loss"' in line:
        assert jobs.read_losses(tmp_path)[0] == 3.0 and len(jobs.read_losses(tmp_path)) < 3


SUMMARY = {"train_s": 1.5, "tokens_per_s": 10.0, "step_s_median": 0.1, "first_step_s": 1, "steps": 3}
SUMMARY |= {"parameters": 10, "threads": 2, "ranks": 1, "peak_memory": [1 << 30], "peak_gpu_memory": None}
SUMMARY |= {"allreduce": None}


def test_a_summary_holds_what_is_read_of_it(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(SUMMARY))
    assert jobs.read_summary(tmp_path) == SUMMARY
    for key in SUMMARY:
        for wrong in ('"1"', "true", "-1", "[]", '["1"]', "NaN", "1e999", '{"a": 1}'):
            path.write_text(json.dumps({**SUMMARY, key: "@"}).replace('"@"', wrong))
            if (key, wrong) == ("allreduce", '"1"'):
                continue
            with pytest.raises(DataError, match="damaged"):
                jobs.read_summary(tmp_path)
    for text in ("", "[]", "1", "{}"):
        path.write_text(text)
        with pytest.raises(DataError, match="damaged"):
            jobs.read_summary(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match="left no summary"):
        jobs.read_summary(tmp_path)


def test_a_text_of_blanks_is_said_to_be_one():
    assert visible("a b") == "a b" and visible(" x") == " x"
    assert visible(" " * 12 + "\n") == "(nothing to be seen: 12 spaces, 1 line break)"
    assert visible("\t\u2003") == "(nothing to be seen: 2 other blanks)" and "no text" in visible("")
