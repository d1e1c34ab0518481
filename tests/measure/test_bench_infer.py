"""`distgpt bench infer`: what it measures, its table, and what it refuses."""

import json

import pytest
from distgpt.core.base.errors import UsageError
from distgpt.measure.bench import infer
from distgpt.measure.bench.infer import InferOptions


@pytest.mark.ci
def test_every_dtype_and_number_of_requests_gets_a_row(tmp_path, capsys):
    how = {"preset": "tiny", "threads": 1, "dtypes": ("int8",), "requests": (1, 2)}
    options = InferOptions(**how, prompt=5, new=4, out=tmp_path)
    infer.bench(options)
    found = json.loads((tmp_path / "infer-tiny.json").read_text())
    asked = [(row["requests"], row["dtype"]) for row in found["rows"]]
    assert asked == [(n, dtype) for n in (1, 2) for dtype in ("int8",)]
    for row in found["rows"]:
        assert 0 < row["first"] < row["whole_s"]
        assert row["prefill"] == pytest.approx(row["requests"] * 5 / row["first"])
        assert row["decode"] == pytest.approx(row["requests"] * 3 / (row["whole_s"] - row["first"]))
    assert "decode, tokens/s" in capsys.readouterr().out


def test_what_cannot_be_measured_is_refused(tmp_path):
    with pytest.raises(UsageError, match="do not fit the context of 128"):
        infer.bench(InferOptions(preset="tiny", prompt=100, new=64, out=tmp_path))
