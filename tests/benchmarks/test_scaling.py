import json
import sys

import pytest
import scaling
from click.testing import CliRunner
from distgpt.cluster.jobs.processes import run
from distgpt.core.base.errors import UsageError
from distgpt.measure.jobs import unsteered
from report import assemble, load_all

from conftest import needs_mpi

SMALL = "--n-layer 1 --n-head 2 --n-embd 16 --seq-len 16 --batch-size 4 --data story --tokenizer word --steps 6"


@pytest.mark.ranks
@needs_mpi
@pytest.mark.slow
def test_speeds_are_compared_with_one_rank(tmp_path):
    words = ["--ranks", "2", "--threads", "1", "--out", tmp_path]
    result = run([sys.executable, scaling.__file__, *SMALL.split(), *words], env=unsteered())
    assert result.code == 0, result.errors
    file = json.loads((tmp_path / "scaling-tiny.json").read_text())
    rows = [(row["mode"], row["ranks"], row["batch"]) for row in file["measured"]]
    assert rows == [("strong", 1, 4), ("strong", 2, 4), ("weak", 1, 4), ("weak", 2, 8)]
    for row in file["measured"]:
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * 16 / row["step_s"])
        assert row["speedup"] == pytest.approx(row["tokens_per_s"] / file["measured"][0]["tokens_per_s"])
        assert row["efficiency"] == pytest.approx(row["speedup"] / row["ranks"])
    page = assemble(*load_all(tmp_path))
    assert "Scaling: tiny" in page and "Left out" not in page


@pytest.mark.parametrize("words, named", [("--ranks 1,0", "'1,0'"), ("--ranks 3", "3 ranks"), ("--init w", "--init")])
def test_invalid_options_are_rejected_before_running(tmp_path, words, named):
    asked = [*SMALL.split(), *words.split(), "--out", str(tmp_path / "out")]
    error = CliRunner().invoke(scaling.main, asked).exception
    assert isinstance(error, UsageError) and named in str(error) and not list(tmp_path.iterdir())
