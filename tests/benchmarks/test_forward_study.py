"""The forward-pass study: plain Python and PyTorch beside our methods, and its table."""

import json
import sys
from dataclasses import replace

import forward_study
import pytest
from benching import FEW, found_in, here
from click.testing import CliRunner
from distgpt.cluster.jobs.processes import run
from distgpt.core.base.errors import DisagreementError, DistgptError, UsageError
from distgpt.measure.jobs import unsteered
from distgpt.show.page import tabulated
from forward_peers import measure_plain
from forward_study import Study, StudyOptions, methods_and_launcher
from forward_work import COLUMNS, Job, blocks, refuse_different_losses, row_of, sequences, with_speedups
from report import assemble, load_all


@pytest.mark.slow
def test_the_study_measures_prints_and_leaves_a_file(tmp_path):
    words = ["--preset", "microgpt", "--names", 60, "--repeats", 1, "--threads", 1]
    words += ["--method", "batched", "--out", tmp_path]
    done = run([sys.executable, forward_study.__file__, *words], env=unsteered())
    assert done.code == 0, done.errors
    found = json.loads((tmp_path / "forward-microgpt.json").read_text())
    assert [(r["method"], r["names"], r["ranks"]) for r in found["rows"]] == [("batched", 60, 1)]
    page = assemble(*load_all(tmp_path))
    assert "Forward pass: microgpt" in page and "Left out" not in page


class Here(Study):
    """Measures in this process."""

    def measure(self, job):
        return here(job)


def study_of(methods, dtypes=("float32",), chosen=True, kind=Study):
    chosen = methods if chosen else ()
    options = StudyOptions(methods=chosen, dtypes=dtypes, threads=1, repeats=1)
    return kind(options, methods, None, "")


def test_each_type_of_a_preset_is_a_row():
    study = study_of(["batched"], ["float32", "float64"], kind=Here)
    study.options = replace(study.options, names=80)
    rows = study.rows(["microgpt"])
    assert [(r["names"], r["dtype"]) for r in rows] == [(80, dtype) for dtype in ("float32", "float64")]


def test_what_was_measured_on_a_part_is_scaled_by_its_predictions_and_compared_with_that_part():
    job = replace(FEW, method="serial", dtype="float64")
    part = here(replace(job, names=70))
    found = row_of(job, part)
    whole, some = sequences(90), sequences(70)
    share = (len(whole.tokens) - 90) / (len(some.tokens) - 70)
    assert found["seconds"] == pytest.approx(part["seconds"] * share) and found["measured"] == 70
    study = study_of(["serial"], kind=Here)
    study.check_part(found)
    with pytest.raises(DisagreementError):
        study.check_part(found | {"loss": found["loss"] * 1.001})


def test_what_was_measured_on_a_part_of_the_names_is_marked():
    serial = row_of(replace(FEW, method="serial", dtype="float64"), found_in(8.0, measured=30))
    fast = row_of(FEW, found_in(1.0, measured=90)) | {"peak_gpu_memory": [3_000_000]}
    rows = with_speedups([serial, fast])
    shown = {cell[1]: cell for cell in tabulated(COLUMNS, rows).rows}
    assert [cell.endswith("*") for cell in shown["serial"]] == [False] * 4 + [True] + [False] * 3
    assert shown["batched"][4:8] == ["1.00", f"{rows[0]['seconds']:.1f}", "90", "5 + 3 GPU"]
    assert "30 of 90 names" in blocks({"rows": rows})[-1].note


def test_every_type_and_every_method_that_was_asked_for_is_measured():
    jobs = study_of(["serial", "batched", "cuda"], ["float32", "bfloat16"]).jobs("S", 2)
    assert [(job.method, job.dtype) for job in jobs] == [
        ("serial", "float64"),
        *((method, dtype) for method in ("batched", "cuda") for dtype in ("float32", "bfloat16")),
    ]
    for methods, dtypes in ((("serial", "batched"), ("bfloat16",)), (("serial",), ("float32",))):
        assert methods_and_launcher(StudyOptions(methods=methods, dtypes=dtypes))[0] == list(methods)
    with pytest.raises(UsageError, match="--method python and serial computes in float64"):
        methods_and_launcher(StudyOptions(methods=("python", "serial"), dtypes=("bfloat16", "float32")))


def test_plain_python_agrees_and_refuses_what_would_take_too_long():
    plain = replace(FEW, method="python", dtype="float64")
    batched = replace(FEW, dtype="float64")
    refuse_different_losses([row_of(plain, measure_plain(plain)), row_of(batched, here(batched))])
    with pytest.raises(UsageError, match=r"about [\d,]+ s for 5,000 names of S: --names \d+ fits into the 5 s"):
        measure_plain(Job("S", "python", 5000, patience=5))
    with pytest.raises(UsageError, match="of MXL5: raise --patience"):
        measure_plain(Job("MXL5", "python", 5000, patience=1))


@pytest.mark.ci
def test_what_makes_no_sense_is_refused(tmp_path):
    for words, said in (
        (("--method", "serial", "--dtype", "bfloat16"), "--method serial computes"),
        (("--method", "batched", "--out", __file__), "cannot write to"),
        (("--method", "torch", "--peer", str(tmp_path / "python")), "cannot import torch"),
        (("--peer", str(tmp_path / "python")), "cannot import torch"),
    ):
        found = CliRunner().invoke(forward_study.main, words)
        assert isinstance(found.exception, DistgptError) and said in str(found.exception)
