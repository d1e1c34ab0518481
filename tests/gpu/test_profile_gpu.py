import numpy as np
import pytest
from devices import ON_GPU, device, kernels
from distgpt.core.config.presets import preset
from distgpt.core.model.counts import BACKWARD, operations
from distgpt.measure.estimate import Trial
from distgpt.measure.profile import operations as rows
from distgpt.measure.profile.recorder import Timer
from distgpt.measure.profile.session import Profiler, of_rank, peak_gflops, result

FLOAT = np.dtype(np.float32)


def test_marks_measure_device_time():
    on = device()
    clock = Timer.of(on)
    array, begun = on.zeros((1 << 16,), FLOAT), clock.now()
    stamps = []
    for _ in range(5):
        on.zero(array)
        stamps.append(clock.now())
    seconds = np.array([clock.since(stamp, begun) for stamp in stamps])
    assert (seconds > 0).all() and (np.diff(seconds) >= 0).all() and seconds[-1] < 60


@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_steps_are_profiled_on_a_device(mlp):
    k = kernels("float32", graphs=False)
    size = {"n_layer": 2, "n_head": 2, "n_embd": 32, "seq_len": 16, "vocab_size": 50, "batch_size": 4}
    trial = Trial(preset("gpt-mini", {**size, "grad_accum": 1, "mlp": mlp, "recompute": "none"}), k)
    step, batches = trial.trained, trial.batches
    profiler = Profiler(step, k.device)
    assert len(list(profiler.steps(batches, 3))) == 5
    assert len(profiler.seconds) == 3 and all(seconds > 0 for seconds in profiler.seconds)
    assert "linear" not in vars(k)
    about = {"stage": "cuda", "ranks": 1, "threads": 0, "gpu": True, "dtype": "float32", "parameters": 1}
    found = result([of_rank(profiler, 0, 1.0)], {**about, "tokens_per_step": 64})
    named = {row["row"]: row for row in found["rows"]}
    assert {"Matmul with activation forward", "Matmul with activation backward"} <= set(named)
    assert "Head and cross-entropy" in named and rows.GPU_WAITS in named and rows.WORKERS not in named
    assert named[rows.GPU_WAITS]["share"] >= -0.03
    flops = sum(row["gflop"] for row in found["rows"]) * 1e9
    assert flops == pytest.approx(64 * (1 + BACKWARD) * operations(step.model).forward)


def test_peak_is_measured_on_a_device(monkeypatch):
    if not ON_GPU:  # small sizes for the emulated GPU
        monkeypatch.setattr("distgpt.measure.profile.session.SIDES", (32, 64))
    assert peak_gflops(kernels("bfloat16"), 0.02) > 0
