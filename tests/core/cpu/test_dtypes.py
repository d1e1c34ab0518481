"""--dtype auto: the chosen number format, which a run keeps, and explicit formats."""

import json
import re
from types import SimpleNamespace

import distgpt as library
import numpy as np
import pytest
from distgpt.core.base.errors import UsageError
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import GpuConfig, RunConfig
from distgpt.core.cpu import stages
from distgpt.core.cpu.compiling import processor
from distgpt.core.cpu.compiling.processor import AMX, ARM64, AVX2, AVX512, AVX512_BF16
from distgpt.core.cpu.stages import expected_dtype, open_stage
from distgpt.core.generate.engine_setup import ModelSpec
from distgpt.core.ops.low_precision import BITS
from distgpt.core.saved.rundir import RunDirectory
from distgpt.gpu.stage import GpuStage
from distgpt.inference.evaluation.evaluate import evaluate
from distgpt.models.quantized.rounded import quantize

from conftest import SMALL, ci_ranks, inside, succeeded, train

STEPS = ("--steps", "4", "--save-every", "2")
BF16, F32, FREE = ({stages.VARIABLE: name} for name in ("bfloat16", "float32", ""))


class Ranks(SerialComm):
    others = ()

    def allreduce_max(self, value):
        return max([value, *self.others])


def on_gpus(*capabilities, **options):
    comm = Ranks()
    comm.others = [-(10 * major + minor) for major, minor in capabilities[1:]]
    device = SimpleNamespace(capability=capabilities[0], name="a GPU")
    return GpuStage("cuda", comm, 0, device=device, gpu=GpuConfig(**options))


@pytest.fixture
def free(monkeypatch):
    monkeypatch.delenv(stages.VARIABLE)


def saved(path):
    return RunDirectory(path).saved().train.dtype


def ran(out, *words, env=BF16):
    own = ("--data", "story", "--threads", "1") if {"--init", "--depth"} & {*words} else SMALL
    succeeded("train", *own, *STEPS, *words, "--out", out, env=env)
    return saved(out)


def chosen(stage="serial", **settings):
    return expected_dtype(stage, RunConfig().with_values(settings))


def test_gpus_use_bfloat16_from_capability_8(free):
    assert on_gpus((8, 0)).auto_dtype().name == "bfloat16"
    assert on_gpus((9, 0), (8, 6)).auto_dtype().name == "bfloat16"
    for stage in (on_gpus((7, 5)), on_gpus((9, 0), (7, 5)), on_gpus((9, 0), tf32=True)):
        found = stage.auto_dtype()
        assert found.name == "float32" and found.why and stage.auto_dtype(weights=1 << 40).name == "float32"
    assert on_gpus((9, 0)).auto_dtype(weights=1000).name == "bfloat16"


@pytest.mark.parametrize("shape, name, small, large", [
    (ARM64, "float32", "float32", "float32"),  # not timed
    (AVX2, "float32", "float32", "bfloat16"),  # long reads of weights decide for generation
    (AVX512, "float32", "float32", "bfloat16"),
    (AVX512_BF16, "bfloat16", "bfloat16", "bfloat16"),
    (AMX, "bfloat16", "bfloat16", "bfloat16"),
])  # fmt: skip
def test_processors_use_bfloat16_if_fast(shape, name, small, large, monkeypatch, free):
    monkeypatch.setattr(processor, "shape", lambda: shape)
    assert chosen().name == name and chosen().why and chosen(matmul="blas").name == "float32"
    stage = open_stage("serial", 1)
    assert stage.auto_dtype(weights=1 << 20).name == small
    assert stage.auto_dtype(weights=stages.READ_FROM_MEMORY // 4).name == large


def test_dtype_variable_is_checked(monkeypatch):
    assert chosen() == stages.Dtype("float32")
    monkeypatch.setenv(stages.VARIABLE, "float16")
    with pytest.raises(UsageError, match="float16"):
        chosen()


def test_run_records_and_keeps_auto_dtype(tmp_path, free):
    expected, out = chosen(), tmp_path / "run"
    result = inside("train", *SMALL, *STEPS, "--out", out, env=FREE)
    assert result.returncode == 0 and f"{expected.name}: {expected.why}" in result.stdout
    assert saved(out) == expected.name and not re.search('dtype = "auto"', RunDirectory(out).config.read_text())
    other = F32 if expected.name == "bfloat16" else BF16
    assert ran(tmp_path / "branch", "--steps", "6", "--resume", out, env=other) == expected.name
    assert ran(out, "--steps", "6", "--resume", "auto", "--dtype", "auto", env=other) == expected.name


@pytest.mark.parametrize("words, expected", [
    ("--config {folder}/double.toml", "float64"),
    ("--config {folder}/open.toml", "bfloat16"),
    ("--config {folder}/double.toml --dtype auto", "bfloat16"),
    ("--dtype float32", "float32"),
    ("--reproducible-parts 2", "bfloat16"),
    ("--deterministic", "bfloat16"),
    ("--init {base}", "bfloat16"),
    ("--init {base} --lora-rank 2", "bfloat16"),
    ("--init {rounded} --lora-rank 2", "bfloat16"),
    ("--depth 1 --seq-len 16 --batch-size 8", "bfloat16"),
])  # fmt: skip
def test_explicit_dtype_overrides_auto(words, expected, tmp_path, trained):
    (tmp_path / "double.toml").write_text('dtype = "float64"\n')
    (tmp_path / "open.toml").write_text('[train]\ndtype = "auto"\n')
    rounded = tmp_path / "int8.safetensors"
    if "{rounded}" in words:
        quantize(trained / "weights.safetensors", rounded)
    assert ran(tmp_path / "run", *words.format(base=trained, rounded=rounded, folder=tmp_path).split()) == expected


@ci_ranks
def test_ranks_agree_on_dtype(tmp_path):
    assert saved(train(tmp_path / "run", *STEPS, "--outer-every", "2", ranks=2, env=BF16)) == "bfloat16"


@pytest.mark.ci
def test_within_measures_in_auto_dtype(tmp_path):
    words = ("--within", "4s", "--data", "story", "--threads", "1", "--out", tmp_path / "run")
    result = succeeded("train", *words, env=BF16)
    assert saved(tmp_path / "run") == "bfloat16" and "--within: depth" in result.stdout


@pytest.mark.ci
def test_auto_dtype_in_tuning_generation_and_python(tmp_path, trained, monkeypatch):
    monkeypatch.setenv(stages.VARIABLE, "bfloat16")
    (tmp_path / "chats.jsonl").write_text('{"text": "abc"}\n' * 4)
    ran(tmp_path / "base", "--tokenizer", "byte")
    succeeded(
        *("tune", "--weights", tmp_path / "base", "--data", tmp_path / "chats.jsonl", "--out", tmp_path / "tuned")
    )
    assert saved(tmp_path / "tuned") == "bfloat16"
    stage, weights = open_stage("serial", 1), trained / "weights.safetensors"
    found = ModelSpec(weights, "auto").load(stage)
    assert found.dtype == "bfloat16" and found.model.kernels.dtype == BITS
    assert ModelSpec(weights, "float32").load(stage).dtype == "float32"
    quantize(weights, tmp_path / "small.safetensors")
    assert ModelSpec(tmp_path / "small.safetensors", "auto").load(stage).dtype == "int8"
    # Evaluation and inspection stay in float32.
    assert evaluate(stage, weights, val="story", val_tokens=64)["dtype"] == "float32"
    assert library.load(weights).parameters()["wte"].dtype == np.float32
    run = library.train(preset="tiny-adamw", n_layer=1, n_embd=16, n_head=1, seq_len=16, steps=2, out=tmp_path / "api")
    assert saved(run.directory) == "bfloat16"


@pytest.mark.parametrize("words, env", [
    ("--preset tiny --n-layer 1 --n-embd 16 --n-head 1 --batch-size 2", BF16),
    ("--preset gpt2 --stage cuda", FREE),  # an imagined GPU
])  # fmt: skip
def test_estimate_uses_auto_dtype(words, env, tmp_path):
    found = inside("estimate", *words.split(), "--no-measure", "--json", env=env, cwd=tmp_path)
    assert json.loads(found.stdout)["dtype"] == "bfloat16", found.stderr


def test_sweep_decides_dtype_once(tmp_path):
    out, grid = tmp_path / "sweep", 'preset = "tiny-adamw"\nn_layer = 1\nn_embd = 16\nn_head = 1\nseq_len = 16\n'
    grid += 'steps = 2\nbatch_size = 2\n[sweep]\nmetric = "loss"\n'

    def swept(rates, env):
        (tmp_path / "grid.toml").write_text(f"{grid}lr = {rates}\n")
        succeeded("sweep", tmp_path / "grid.toml", "--threads", "1", "--out", out, env=env)
        return [saved(run) for run in sorted(out.glob("lr=*"))]

    swept([0.01], BF16)
    assert swept([0.01, 0.02], F32) == ["bfloat16"] * 2
    # Sweeps of earlier versions have no dtype and computed in float32.
    before = json.loads((out / "grid.json").read_text())
    del before["fixed"]["dtype"]
    (out / "grid.json").write_text(json.dumps(before))
    assert swept([0.01, 0.02, 0.03], BF16)[-1] == "float32"
