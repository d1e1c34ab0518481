"""The forward-pass study's work: every method on the same names and weights; losses have to agree."""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import timing
from benching import FEW, found_in, here
from distgpt.core.base.errors import DisagreementError
from distgpt.core.comm.api import SerialComm
from distgpt.core.config.presets import preset
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.stages import Stage
from distgpt.core.model.layers import activation_widths
from distgpt.core.model.model import Architecture, Model
from distgpt.gpu.stage import GpuStage
from forward_work import (
    AGREE,
    NAMES,
    bundled_names,
    refuse_different_losses,
    row_of,
    rows_at_once,
    sequences,
    tokens_of,
    with_speedups,
)


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
    reference = row_of(FEW, here(replace(FEW, dtype="float64"), threads=2)) | {"dtype": "float64"}
    for method, dtype in (("serial", "float64"), ("batched", "float32")):
        job = replace(FEW, method=method, dtype=dtype)
        found = row_of(job, here(job))
        refuse_different_losses([reference, found])
        assert found["measured"] == found["names"] == 90 and found["seconds"] > 0, method
        assert found["tokens"] == sum(len(name) + 1 for name in bundled_names(90))


def test_a_loss_that_is_another_ends_the_command():
    double = row_of(FEW, found_in(1.0, 90)) | {"dtype": "float64"}
    other = double | {"method": "torch", "dtype": "float32"}
    refuse_different_losses([double, other | {"loss": double["loss"] * (1 + AGREE["float32"] / 2)}])
    for loss in (double["loss"] * (1 + 2 * AGREE["float32"]), math.nan, math.inf):
        with pytest.raises(DisagreementError, match="torch in float32 finds a loss of"):
            refuse_different_losses([double, other | {"loss": loss}])
    with pytest.raises(DisagreementError):  # in double precision less is allowed
        refuse_different_losses([double, double | {"loss": double["loss"] * (1 + 1e-8)}])


def test_patience_cuts_passes_and_then_names():
    for each, measured, passes in ((0.0, 500, 5), (0.2, 300, 1), (10.0, timing.PROBE, 1)):  # seconds a name
        found = timing.timed(float, 500, 5, 60.0, agreed=lambda took, each=each: each * timing.PROBE)
        assert (found["measured"], len(found["all_seconds"]), found["loss"]) == (measured, passes, measured)


def test_speedups_are_over_serial_on_the_same_work():
    work = ((10, "serial", 4.0), (10, "batched", 2.0), (20, "batched", 2.0))
    rows = [{"preset": "S", "names": n, "measured": n, "method": m, "seconds": s} for n, m, s in work]
    assert [r["speedup"] for r in with_speedups(rows)] == [1.0, 2.0, None]


def test_a_batch_on_a_gpu_takes_half_of_what_is_free():
    model = Model(Architecture(preset("XL").model), CpuKernels("float32", 1))
    widths = sum(activation_widths(model.config).values())

    def rows_with(free):
        device = SimpleNamespace(memory=lambda: (free, free), sharing=1, index=0, name="")
        return rows_at_once(model, GpuStage("cuda", SerialComm(), 0, device=device))

    assert rows_with(1 << 50) == 1 << 18 and rows_with(0) == 1
    free = 2 * (1 << 30)
    assert rows_with(free // 2) < rows_with(free) and 4 * widths * rows_with(free) < free / 2
    assert rows_at_once(model, Stage("serial", SerialComm(), 1)) == 1 << 10
