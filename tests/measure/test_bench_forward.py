"""bench forward: every method on the same names and weights, and losses that have to agree."""

import json
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from conftest import distgpt, needs_mpi

from distgpt.comm import cores
from distgpt.comm.serial import SerialComm
from distgpt.commands.bench import forward as command_line
from distgpt.config.presets import preset
from distgpt.errors import DisagreementError, DistgptError, UsageError
from distgpt.kernels.cpu import CpuKernels
from distgpt.machine.stages import Stage
from distgpt.measure.bench.forward import (
    Job,
    bundled_names,
    measure,
    rows_at_once,
    sequences,
    tokens_of,
)
from distgpt.measure.bench.report import assemble, load_all
from distgpt.measure.bench.study import (
    AGREE,
    Contest,
    ForwardOptions,
    ablation,
    agree,
    check_dtypes,
    row,
    study,
    with_speedups,
)
from distgpt.measure.bench.study_page import COLUMNS, charts, text
from distgpt.measure.jobs import unsteered
from distgpt.measure.peer import timing
from distgpt.measure.published import NAMES
from distgpt.model.layers import Block
from distgpt.model.model import Model
from distgpt.show.page import tabulated

FEW = Job("microgpt", "batched", 90, repeats=1)


def here(job, threads=1):
    return measure(job, Stage("serial", SerialComm(), threads))


def test_names_are_the_same_in_every_run_and_start_again_when_they_run_out():
    names = bundled_names(12_600)
    assert names[:3] == bundled_names(3) and names[12_515:] == names[:85]
    assert len(set(names[:12_515])) == 12_515
    assert tokens_of("abz") == [0, 1, 2, 26, 0]
    assert max(map(len, names)) + 1 <= preset("microgpt").model.seq_len  # the shortest context
    assert all(preset(name).model.vocab_size == 27 for name in NAMES)
    a, b = sequences(50).first(20), sequences(20)
    assert a.tokens.tolist() == b.tokens.tolist() and a.lengths.tolist() == b.lengths.tolist()


def test_methods_agree():
    reference = row(FEW, here(replace(FEW, dtype="float64"), threads=2)) | {"dtype": "float64"}
    for method, dtype in (
        *(("python", "float64"), ("serial", "float64")),
        *(("batched", "float64"), ("batched", "float32"), ("batched", "bfloat16")),
    ):
        job = replace(FEW, method=method, dtype=dtype)
        found = row(job, here(job))
        agree([reference, found])
        assert found["measured"] == found["names"] == 90 and found["seconds"] > 0, method
        assert found["tokens"] == sum(len(name) + 1 for name in bundled_names(90))


def test_a_loss_that_is_another_ends_the_command():
    double = row(FEW, found_in(1.0, 90)) | {"dtype": "float64"}
    other = double | {"method": "torch", "dtype": "float32"}
    agree([double, other | {"loss": double["loss"] * (1 + AGREE["float32"] / 2)}])
    for loss in (double["loss"] * (1 + 2 * AGREE["float32"]), math.nan, math.inf):
        with pytest.raises(DisagreementError, match="torch in float32 finds a loss of"):
            agree([double, other | {"loss": loss}])
    with pytest.raises(DisagreementError):  # in double precision less is allowed
        agree([double, double | {"loss": double["loss"] * (1 + 1e-8)}])


def test_what_was_measured_on_a_part_is_scaled_by_its_predictions_and_compared_with_that_part():
    job = replace(FEW, method="serial", dtype="float64")
    part = here(replace(job, names=70))
    found = row(job, part)
    whole, some = sequences(90), sequences(70)
    share = (len(whole.tokens) - 90) / (len(some.tokens) - 70)
    assert found["seconds"] == pytest.approx(part["seconds"] * share) and found["measured"] == 70
    contest = contest_of(["serial"], kind=Here)
    contest.check_part(found)
    with pytest.raises(DisagreementError):
        contest.check_part(found | {"loss": found["loss"] * 1.001})


def test_patience_cuts_passes_and_then_names():
    for each, measured, passes in ((0.0, 500, 5), (0.2, 300, 1), (10.0, timing.PROBE, 1)):  # seconds a name
        found = timing.timed(float, 500, 5, 60.0, agreed=lambda took, each=each: each * timing.PROBE)
        assert (found["measured"], len(found["all_seconds"]), found["loss"]) == (measured, passes, measured)


def test_plain_python_refuses_what_would_take_too_long():
    with pytest.raises(
        UsageError, match=r"about [\d,]+ s for 5,000 names of S: --names \d+ fits into the 5 s"
    ):
        here(Job("S", "python", 5000, patience=5))
    with pytest.raises(UsageError, match="of MXL5: raise --patience"):
        here(Job("MXL5", "python", 5000, patience=1))


def test_speedups_are_over_serial_on_the_same_work():
    work = ((10, "serial", 4.0), (10, "batched", 2.0), (20, "batched", 2.0))
    rows = [{"preset": "S", "names": n, "measured": n, "method": m, "seconds": s} for n, m, s in work]
    assert [r["speedup"] for r in with_speedups(rows)] == [1.0, 2.0, None]


@needs_mpi
def test_a_sweep_measures_prints_draws_and_leaves_a_file(tmp_path):
    words = ["--preset", "microgpt", "--names", 60, "--sweep", "input", "--repeats", 1, "--threads", 1]
    words += ["--method", "batched", "--method", "mpi", "--out", tmp_path]
    done = distgpt("bench", "forward", *map(str, words))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "forward-microgpt-input.json").read_text())
    assert found["kind"] == "forward" and found["sweep"] == "input" and found["ablation"] == []
    assert [(r["method"], r["names"], r["ranks"]) for r in found["rows"]] == [
        ("batched", 60, 1), ("mpi", 60, 2)
    ]  # fmt: skip
    losses = [r["loss"] for r in found["rows"]]
    assert losses == pytest.approx([losses[0]] * 2, rel=1e-5)
    assert re.search(r"microgpt +mpi +float32 +2 × 1", done.stdout)
    picture = (tmp_path / "forward-microgpt-input.svg").read_text()
    assert "<svg" in picture and "batched, float32" in picture
    page = assemble(*load_all(tmp_path), [])
    assert "Forward pass: microgpt-input" in page and "Left out" not in page


class Here(Contest):
    """Measures in this process."""

    def by_us(self, job):
        return here(job)


def contest_of(methods, dtypes=("float32",), chosen=True, kind=Contest):
    options = ForwardOptions(methods=methods if chosen else (), dtypes=dtypes, threads=1, repeats=1)
    return kind(options, methods, "", None)


def test_a_sweep_goes_over_the_names_and_an_ablation_over_batches_and_types():
    contest = contest_of(["batched"], ["float32", "float64"], kind=Here)
    rows = study(contest, ["microgpt"], 520, "input")
    assert [(r["names"], r["dtype"]) for r in rows] == [
        (names, dtype) for names in (500, 520) for dtype in ("float32", "float64")
    ]
    parts = ablation(contest, "microgpt", 80)
    assert [(r["batched"], r["dtype"]) for r in parts] == [
        (batched, dtype) for batched in (False, True) for dtype in ("float64", "float32")
    ]
    assert parts[0]["speedup"] == 1 and all(part["speedup"] > 0 for part in parts)


def test_what_rests_on_a_part_of_the_names_is_marked_everywhere():
    serial = row(replace(FEW, method="serial", dtype="float64"), found_in(8.0, measured=30))
    fast = row(FEW, found_in(1.0, measured=90)) | {"peak_gpu_memory": [3_000_000]}
    slow = row(replace(FEW, method="python", dtype="float64"), found_in(1500.0, measured=90))
    rows = with_speedups([serial, fast, slow])
    shown = {cell[1]: cell for cell in tabulated(COLUMNS, rows).rows}
    assert [cell.endswith("*") for cell in shown["serial"]] == [False] * 4 + [True] * 3 + [False]
    assert shown["batched"][4:8] == ["1.00", f"{rows[0]['seconds']:.1f}*", "90", "5 + 3 GPU"]
    assert shown["python"][5].startswith("0.01") and shown["python"][5].endswith("*")
    found = {"rows": rows, "sweep": "joint", "ablation": rows[:2]}
    for each in found["ablation"]:
        each["batched"] = each["method"] == "batched"
    (chart,) = charts(found).values()
    assert {s.name: s.dashed for s in chart.series} == {
        "serial, float64 *": True, "batched, float32": False, "python, float64": False
    }  # fmt: skip
    assert "a part of the names" in chart.description and "more names" not in chart.title
    assert text(found).count("*") >= 6
    larger = {**fast, "preset": "S", "names": 91}
    assert "more names for larger models" in charts(found | {"rows": [*rows, larger]})[""].title


def found_in(seconds, measured):
    found = {"ranks": 1, "threads": 1, "measured": measured, "seconds": seconds, "all_seconds": [seconds]}
    return found | {"loss": 3.0, "peak_memory": [5_000_000]}


def test_plain_python_is_chosen_where_it_belongs_and_measured_wherever_it_is_asked_for():
    own = contest_of(["python", "batched"], chosen=False)
    assert [job.method for job in own.jobs("microgpt", 2)] == ["python", "batched"]
    assert [job.method for job in own.jobs("M", 2)] == ["batched"]
    assert [job.method for job in own.jobs("microgpt", 10**5)] == ["batched"]
    assert [job.method for job in contest_of(["python"]).jobs("M", 2)] == ["python"]


def test_every_type_and_every_method_that_was_asked_for_is_measured():
    jobs = contest_of(["serial", "batched", "cuda"], ["float32", "bfloat16"]).jobs("S", 2)
    assert [(job.method, job.dtype) for job in jobs] == [
        ("serial", "float64"),
        *((method, dtype) for method in ("batched", "cuda") for dtype in ("float32", "bfloat16")),
    ]
    check_dtypes(["serial", "batched"], ["bfloat16"])
    check_dtypes(["serial"], ["float32"])
    with pytest.raises(UsageError, match="--method python and serial computes in float64"):
        check_dtypes(["python", "serial"], ["bfloat16", "float32"])


def test_a_batch_on_a_gpu_takes_half_of_what_is_free():
    model = Model(preset("XL").model, CpuKernels("float32", 1))
    widths = sum(Block.activations(model.config).values())

    def rows_with(free):
        device = SimpleNamespace(memory=lambda: (free, free), index=0, name="")
        return rows_at_once(model, Stage("cuda", SerialComm(), 0, device))

    assert rows_with(1 << 50) == 1 << 18 and rows_with(0) == 1
    free = 2 * (1 << 30)
    assert rows_with(free // 2) < rows_with(free) and 4 * widths * rows_with(free) < free / 2
    assert rows_at_once(model, Stage("serial", SerialComm(), 1)) == 1 << 10


def test_both_sides_are_measured_alike():
    assert timing.peak_memory() == pytest.approx(cores.peak_memory(), rel=0.01)
    kept = {"NUMBA_CACHE_DIR": "somewhere", "HOME": "here"}
    assert unsteered(kept | {"NUMBA_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "x"}) == kept


def test_what_makes_no_sense_is_refused(tmp_path):
    for words, said in (
        (("--method", "torch", "--peer", str(tmp_path / "python")), "cannot import torch"),
        (("--sweep", "input", "--preset", "S", "--preset", "M"), "one --preset"),
        (("--peer", str(tmp_path / "python")), "cannot import torch"),
        (("--method", "serial", "--dtype", "bfloat16"), "--method serial computes"),
        (("--method", "batched", "--out", __file__), "cannot write to"),
    ):
        found = CliRunner().invoke(command_line, words)
        assert isinstance(found.exception, DistgptError) and said in str(found.exception)
