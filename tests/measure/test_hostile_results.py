"""Records and results made to hurt: what is read is checked, and what is broken is left out and said."""

import pytest

from distgpt.errors import DataError
from distgpt.measure.compare.page import visible
from distgpt.show.plot import read_runs


@pytest.mark.parametrize("line", [
    '{"step": true, "loss": 1.0}', '{"step": 1.5, "loss": 1.0}', '{"step": "1", "loss": 1.0}', '{"step": -1}',
    '{"step": 1, "loss": "2.0"}', '{"step": 1, "loss": true}', '{"step": 1, "loss": NaN}', '{"step": 1e400}',
    '{"step": 1, "step": 2}', "[]", "1", '{"step": null}', '{"loss": 1.0}', "[" * 5000 + "]" * 5000,
])  # fmt: skip
def test_metrics_are_numbers_by_name(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 3.0}\n' + line + "\n")
    with pytest.raises(DataError, match="line 2"):
        read_runs([tmp_path])


def test_a_text_of_blanks_is_said_to_be_one():
    assert visible("a b") == "a b" and visible(" x") == " x"
    assert visible(" " * 12 + "\n") == "(nothing to be seen: 12 spaces, 1 line break)"
    assert visible("\t\u2003") == "(nothing to be seen: 2 other blanks)" and "no text" in visible("")
