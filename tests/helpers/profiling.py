"""Profiled steps of small models, for the tests of `distgpt profile`."""

from distgpt.core.config.presets import preset
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.measure.estimate import Trial
from distgpt.measure.profile import operations as ops
from distgpt.measure.profile.session import Profiler


def job(threads=1, batch_size=8, **changes):
    """A step of some model on random tokens, and its batches."""
    size = {"n_layer": 3, "n_head": 4, "n_embd": 64, "seq_len": 32, "vocab_size": 50, "grad_accum": 1}
    run = preset("gpt-mini", {**size, "batch_size": batch_size, "recompute": "mlp", **changes})
    trial = Trial(run, CpuKernels("float32", threads))
    return trial.trained, trial.batches


def profiled(step, batches, steps=3, warm_up=2):
    """The profiler of so many steps, and how long they took by a clock of our own."""
    profiler = Profiler(step)
    return profiler, list(profiler.steps(batches, steps, warm_up))[warm_up:]


def times(profiler, name):
    row = ("seconds", "calls", "flops").index(name)
    return dict(zip(ops.ORDER, profiler.times[row], strict=True))
