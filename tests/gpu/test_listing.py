"""What a run compiles is known before its first step, and compiled ahead by threads."""

from dataclasses import replace
from functools import partial

import pytest
from devices import gpu, gpu_train, needs_the_processor  # noqa: F401
from fakecupy import FakeCupy

from distgpt.core.config.presets import PRESETS, preset
from distgpt.core.train.setup import rehearse
from distgpt.core.train.sharing import Strategy
from distgpt.gpu.accelerator import kinds_for
from distgpt.gpu.device import CupyDevice

PLAIN = ("--eval-every", "2", "--steps", "4", "--save-every", "2")
RUNS = {
    "gpt2": (),
    "bfloat16": ("--dtype", "bfloat16"),
    "muon": ["--optimizer", "muon", "--norm", "rmsnorm", "--positions", "rope", "--mlp", "relu2"],
    "window": [
        "--window",
        "4",
        "--positions",
        "rope",
        "--n-kv-head",
        "1",
        "--set",
        "qk_norm=true",
        "--no-bias",
    ],
}


@pytest.fixture
def compiled(monkeypatch):
    """What was begun ahead, and what was needed."""
    known, needed, ahead, function = set(), set(), CupyDevice.compile_ahead, CupyDevice._function

    def compile_ahead(device, kinds, *rest):
        known.update(kinds)
        ahead(device, kinds, *rest)

    def noting(device, key):
        needed.add((key[0], key[2]))
        return function(device, key)

    monkeypatch.setattr(CupyDevice, "compile_ahead", compile_ahead)
    monkeypatch.setattr(CupyDevice, "_function", noting)
    return known, needed


@needs_the_processor
@pytest.mark.parametrize("name", RUNS)
def test_a_run_compiles_nothing_that_was_not_begun_ahead(name, gpu, tmp_path, compiled):
    known, needed = compiled
    gpu_train(gpu, tmp_path / "run", *PLAIN, *RUNS[name])
    assert len(needed) > 8 and needed <= known


@needs_the_processor
def test_inference_compiles_nothing_that_was_not_begun_ahead(gpu, compiled):
    known, needed = compiled
    result = gpu("infer", "--stage", "cuda", "--max-new-tokens", "2", "--prompt", "Once upon")
    assert result.returncode == 0, result.stderr
    before = {("reduce", ("STORAGE_FLOAT32",))}  # which looks whether the weights that were read are finite
    assert len(needed) > 4 and needed <= known | before


@pytest.mark.parametrize("name", PRESETS)
def test_the_sources_of_every_preset_are_listed(name):
    run, device = preset(name), CupyDevice(0, xp=FakeCupy())
    run = replace(run, model=replace(run.model, vocab_size=run.model.vocab_size or 300))
    for dtype in ("bfloat16", "float32"):
        work = partial(rehearse, config=run, strategy=Strategy(run.train, 1))
        kinds = kinds_for(device, dtype, work)
        sources = {source for source, _ in kinds}
        assert {"norm", "attention_delta", "attention_cached", "optimizer", "loss", "reduce"} <= sources
        assert ("muon" in sources) == (run.train.optimizer == "muon")
        assert not device.xp.blocks  # nothing was allocated
