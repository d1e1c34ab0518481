import json
import math
import sys
from dataclasses import replace

import forward_study
import pytest
from benching import FEW, found_in, here
from click.testing import CliRunner
from distgpt.cluster.jobs.processes import run
from distgpt.core.base.errors import DisagreementError, DistgptError
from distgpt.measure.jobs import unsteered
from forward_peers import measure_plain
from forward_study import Study, StudyOptions
from forward_work import AGREE, bundled_names, refuse_different_losses, row_of
from report import assemble, load_all

DOUBLE = replace(FEW, dtype="float64")


@pytest.mark.slow
def test_study_prints_and_saves_results(tmp_path):
    words = ["--preset", "microgpt", "--names", 60, "--repeats", 1, "--threads", 1, "--method", "batched"]
    done = run([sys.executable, forward_study.__file__, *words, "--out", tmp_path], env=unsteered())
    assert done.code == 0, done.errors
    found = json.loads((tmp_path / "forward-microgpt.json").read_text())
    assert [(r["method"], r["names"], r["ranks"]) for r in found["rows"]] == [("batched", 60, 1)]
    assert "Forward pass: microgpt" in (page := assemble(*load_all(tmp_path))) and "Left out" not in page


class Here(Study):
    """A study that measures in this process."""

    def measure(self, job):
        return here(job)


def study_of(methods, dtypes=("float32",), **more):
    options = StudyOptions(methods=methods, dtypes=dtypes, threads=1, repeats=1, **more)
    return Here(options, methods, None, "")


def test_study_measures_each_type_and_method():
    rows = study_of(["batched"], ["float32", "float64"], names=80).rows(["microgpt"])
    assert [(r["names"], r["dtype"]) for r in rows] == [(80, dtype) for dtype in ("float32", "float64")]
    jobs = study_of(["serial", "batched", "cuda"], ["float32", "bfloat16"]).jobs("S", 2)
    dtypes = [(method, dtype) for method in ("batched", "cuda") for dtype in ("float32", "bfloat16")]
    assert [(job.method, job.dtype) for job in jobs] == [("serial", "float64"), *dtypes]


def test_methods_give_equal_losses():
    reference = row_of(DOUBLE, here(DOUBLE, threads=2))
    plain = replace(DOUBLE, method="python")
    refuse_different_losses([reference, row_of(plain, measure_plain(plain))])
    for method, dtype in (("serial", "float64"), ("batched", "float32")):
        found = row_of(job := replace(FEW, method=method, dtype=dtype), here(job))
        refuse_different_losses([reference, found])
        assert found["measured"] == found["names"] == 90 and found["seconds"] > 0, method
        assert found["tokens"] == sum(len(name) + 1 for name in bundled_names(90))


def test_different_loss_ends_the_command():
    double = row_of(FEW, found_in(1.0, 90)) | {"dtype": "float64"}
    other = double | {"method": "torch", "dtype": "float32"}
    refuse_different_losses([double, other | {"loss": double["loss"] * (1 + AGREE["float32"] / 2)}])
    for loss in (double["loss"] * (1 + 2 * AGREE["float32"]), math.nan, math.inf):
        with pytest.raises(DisagreementError, match="torch in float32"):
            refuse_different_losses([double, other | {"loss": loss}])


@pytest.mark.ci
@pytest.mark.parametrize("words, named", [("--method serial --dtype bfloat16", "serial"), ("--peer /no", "torch")])
def test_invalid_options_are_rejected(words, named):
    error = CliRunner().invoke(forward_study.main, words.split()).exception
    assert isinstance(error, DistgptError) and named in str(error)
