"""Scaling: what is predicted follows from what was measured, by arithmetic checked here."""

import json
import sys

import pytest
import scaling
from alphabeta import AlphaBeta, Regime
from click.testing import CliRunner
from conftest import needs_mpi
from predictions import Job, affine, compared, fitted, forecast, steps_by_exchange, summed_by, takes_over
from report import assemble, load_all
from scaling_page import blocks, tables

from distgpt.core.base.errors import UsageError
from distgpt.jobs.processes import run
from distgpt.measure.bench.allreduce import SHARED
from distgpt.measure.jobs import unsteered
from distgpt.parallel.overlapped import BUCKET
from distgpt.show.page import terminal

SMALL = (
    "--n-layer 1 --n-head 2 --n-embd 16 --seq-len 16 --batch-size 4 --data story --tokenizer word --steps 6"
)
JOB = Job(batch=64, seq_len=10, gradient_bytes=1_000_000, fixed=0.001, per_row=0.002)


def exchange(ranks, size):
    """A hundredth of a second among two, and as much more with every doubling."""
    return 0.0 if ranks < 2 else 0.01 * (ranks - 1).bit_length()


def test_compute_is_a_line_through_what_was_measured_and_never_negative():
    assert affine([(8, 0.017), (2, 0.005)]) == pytest.approx((0.001, 0.002))
    assert affine([(8, 0.016)]) == (0.0, 0.002)
    for points in ([(8, 0.016), (2, 0.02)], [(8, 0.016), (2, 0.0001)]):  # noise
        fixed, per_row = affine(points)
        assert fixed >= 0 and per_row >= 0 and fixed + 8 * per_row == pytest.approx(0.016), points


def test_a_forecast_is_a_part_of_the_batch_and_the_sum():
    alone = 0.129
    for mode, rows, weight in (("strong", 8, 1), ("weak", 64, 8)):
        found, one = (forecast(mode, ranks, JOB, exchange) for ranks in (8, 1))
        step = 0.001 + rows * 0.002 + 0.03
        speeds = [found[key] for key in ("step_s", "speedup", "efficiency", "tokens_per_s")]
        speedup = weight * alone / step
        assert speeds == pytest.approx([step, speedup, speedup / 8, weight * 640 / step]), mode
        assert one["speedup"] == pytest.approx(1) and one["allreduce_s"] == 0, mode
    assert not JOB.possible("strong", 128) and JOB.possible("weak", 128) and not JOB.possible("strong", 5)


def test_where_communication_takes_over():
    """Strong: a rank computes 1 + 128 / N ms, and the sum takes 10 ms for each doubling."""
    assert takes_over("strong", JOB, exchange) == 8  # 17 against 30; of 4 ranks 33 against 20
    assert takes_over("strong", JOB, lambda n, size: 0.0) is None
    assert takes_over("weak", JOB, exchange) == 1 << 13  # 129 against 130
    assert takes_over("weak", JOB, lambda n, size: 1e-3) is None


def test_a_measured_step_is_compared_with_one_ranks():
    for mode, step, expected in (("strong", 0.04, (64, 2.5, 0.625)), ("weak", 0.125, (256, 3.2, 0.8))):
        found = compared(mode, 4, step, JOB, 0.1, mode == "weak")
        assert [found[key] for key in ("batch", "speedup", "efficiency")] == pytest.approx(expected)
        assert found["shares_cores"] is (mode == "weak")
        assert found["tokens_per_s"] == pytest.approx(found["batch"] * 10 / step)


def test_the_model_is_fitted_to_the_algorithm_that_training_sums_with():
    for library, form in (("MPICH Version: 5", "scatter-gather"), ("Open MPI v5.0", "ring")):
        truth = AlphaBeta((Regime(form, 1e-5, 1e-9),), 2)
        rows = [
            {"algorithm": "allreduce", "bytes": n, "seconds": truth.seconds(2, n)}
            for n in (8, 1 << 15, 1 << 20)
        ]
        rows += [{**row, "algorithm": "chunked", "seconds": 1.0} for row in rows]
        summed = {"rows": rows, "library": library, "ranks": 2}
        model = fitted(summed, "allreduce")
        assert model.regimes[0].form == form
        assert model.seconds(2, 1 << 22) == pytest.approx(truth.seconds(2, 1 << 22))
        assert fitted(summed, "chunked").piece == 4 << 20
        in_memory = fitted(
            {**summed, "rows": [{**row, "algorithm": SHARED} for row in rows[:3]]}, "allreduce"
        )
        assert in_memory.regimes[0].form == "memory"
    assert (
        summed_by("allreduce", SHARED) == SHARED and summed_by("hierarchical", "hierarchical") == "allreduce"
    )


def test_a_step_by_each_way_to_exchange():
    """With 10 ms for a megabyte, and 1 ms at least; half of that in parts."""

    def summed(size):
        return max(1e-3, size * 1e-8)

    found = steps_by_exchange(0.3, 0.1, 4, 40_000_000, 4, summed, lambda size: summed(size) / 2)
    bucket = 4 * BUCKET * 1e-8
    assert found == pytest.approx(
        {
            "allreduce": 0.4 + 0.4,
            "bfloat16": 0.4 + 0.1 + 1e-3,
            "overlapped": 0.4 + 0.4 - 0.2 + 1e-3,
            "overlapped, bfloat16": 0.4 + bucket / 4 + 1e-3,
            "sharded": 0.3 + 0.025 + 0.2 + 2e-3,
            "sharded, bfloat16": 0.3 + 0.025 + 0.15 + 2e-3,
            "outer-every 16": 0.4 + 0.4 / 16 + 2e-3,
        }
    )
    assert steps_by_exchange(0.3, 0.1, 1, 40_000_000, 4, summed, summed) == {"allreduce": 0.4}


@needs_mpi
@pytest.mark.slow
def test_real_runs_are_measured_and_more_ranks_predicted(tmp_path):
    words = ["--ranks", "2", "--predict", "4,64,1024", "--network", "1gbit,100us", "--out", tmp_path]
    command = [sys.executable, scaling.__file__, *SMALL.split(), "--threads", 1, "--seconds", 2, *words]
    result = run(command, env=unsteered())
    assert result.code == 0, result.errors
    file = json.loads((tmp_path / "scaling-tiny.json").read_text())
    rows = [(row["mode"], row["ranks"], row["batch"]) for row in file["measured"]]
    assert rows == [("strong", 1, 4), ("strong", 2, 4), ("weak", 1, 4), ("weak", 2, 8)]
    for row in file["measured"]:
        assert row["step_s"] > 0 and row["predicted_step_s"] > 0
    rows = [(row["mode"], row["ranks"]) for row in file["predicted"]]
    assert rows == [("strong", 4), ("weak", 4), ("weak", 64), ("weak", 1024)]
    wire = 8 * file["gradient_bytes"] / 1e9
    for row in file["predicted"]:
        assert row["allreduce_s"] >= 2 * (row["ranks"] - 1) / row["ranks"] * wire
        assert row["step_s"] == pytest.approx(row["compute_s"] + row["allreduce_s"])
    assert file["gradient_bytes"] in {row["bytes"] for row in file["allreduce"]["rows"]}
    assert file["not_predicted"] == [{"mode": "strong", "ranks": 64}, {"mode": "strong", "ranks": 1024}]
    page = assemble(*load_all(tmp_path))
    assert "Scaling: tiny" in page and "Left out" not in page
    for off_by, is_shown in ((0.099, True), (0.101, False)):  # of the model from what was measured
        judged = {**file, "off_by": off_by}
        said = " ".join(terminal(blocks(judged)).split())
        assert ("withheld" in said) is not is_shown and len(tables(judged)) == (3 if is_shown else 1)


def bench(*words):
    return CliRunner().invoke(scaling.main, [*SMALL.split(), *map(str, words)])


def test_what_makes_no_sense_is_refused_before_anything_runs(tmp_path):
    for words, said in (
        (["--ranks", "1,0"], "'1,0'"),
        (["--predict", "8,many"], "'8,many'"),
        (["--network", "1gbit"], "'1gbit'"),
        (["--ranks", "3"], "cannot be cut for 3 ranks"),
        (["--init", "weights"], "--init"),
        (["--launcher", "no-such-launcher"], "no-such-launcher"),
    ):
        error = bench(*words, "--out", tmp_path / "out").exception
        assert isinstance(error, UsageError) and said in str(error), words
    assert not list(tmp_path.iterdir())
