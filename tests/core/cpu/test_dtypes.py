"""--dtype auto: which number format it is, that a run keeps it, and that one that is named stays."""

import json
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

from conftest import SMALL, distgpt, inside, needs_mpi, train

STEPS = ("--steps", "4", "--save-every", "2")
BF16, F32, FREE = ({stages.VARIABLE: name} for name in ("bfloat16", "float32", ""))


class Ranks(SerialComm):
    """One rank of several, whose GPUs have other capabilities."""

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
    """Without the variable that the tests have."""
    monkeypatch.delenv(stages.VARIABLE)


@pytest.fixture
def machine(monkeypatch, free):
    """Make this a machine with these registers."""
    return lambda shape: monkeypatch.setattr(processor, "shape", lambda: shape)


def saved(path):
    return RunDirectory(path).saved().train.dtype


def chosen(stage="serial", **settings):
    return expected_dtype(stage, RunConfig().with_values(settings))


def test_gpus_take_bfloat16_from_capability_8_on_and_the_oldest_decides(free):
    assert on_gpus((8, 0)).auto_dtype().name == "bfloat16"
    assert on_gpus((9, 0), (8, 6)).auto_dtype().name == "bfloat16"
    for stage in (on_gpus((7, 5)), on_gpus((9, 0), (7, 5)), on_gpus((9, 0), tf32=True)):
        found = stage.auto_dtype()
        assert found.name == "float32" and found.why
        assert stage.auto_dtype(weights=1 << 40).name == "float32"
    assert on_gpus((9, 0)).auto_dtype(weights=1000).name == "bfloat16"


@pytest.mark.parametrize(
    "shape, name",
    [(ARM64, "float32"), (AVX2, "float32"), (AVX512, "float32"), (AVX512_BF16, "bfloat16"), (AMX, "bfloat16")],
)
def test_processors_take_it_whose_instructions_multiply_it_fast(shape, name, machine):
    machine(shape)
    assert chosen().name == name and chosen().why
    assert chosen(matmul="blas").name == "float32"


def test_long_reads_of_weights_decide_for_generation_on_cpus(machine):
    stage = open_stage("serial", 1)
    for shape, small, large in ((AVX2, "float32", "bfloat16"), (AVX512_BF16, "bfloat16", "bfloat16")):
        machine(shape)
        assert stage.auto_dtype(weights=1 << 20).name == small
        assert stage.auto_dtype(weights=stages.READ_FROM_MEMORY // 4).name == large
    machine(ARM64)  # where it was never timed
    assert stage.auto_dtype(weights=stages.READ_FROM_MEMORY).name == "float32"


def test_the_variable_names_it_and_must_name_one(monkeypatch):
    assert chosen() == stages.Dtype("float32")
    monkeypatch.setenv(stages.VARIABLE, "float16")
    with pytest.raises(UsageError, match="float16"):
        chosen()


@pytest.mark.ci
def test_a_run_says_what_it_takes_and_why_and_writes_it(tmp_path):
    """On this processor, whatever it is."""
    result = distgpt("train", *SMALL, *STEPS, "--out", tmp_path / "run", env=FREE)
    assert result.returncode == 0, result.stderr
    dtype = saved(tmp_path / "run")
    with pytest.MonkeyPatch.context() as patched:
        patched.delenv(stages.VARIABLE)
        expected = chosen()
    assert dtype == expected.name and f"{dtype}: {expected.why}" in result.stdout
    assert "auto" not in {line.partition("dtype = ")[2].strip('"') for line in toml_lines(tmp_path / "run")}


def toml_lines(path):
    return RunDirectory(path).config.read_text().splitlines()


@pytest.mark.ci
def test_a_resumed_run_keeps_its_own(tmp_path):
    for first, second, more in ((BF16, F32, ()), (F32, BF16, ("--dtype", "auto"))):
        out = train(tmp_path / first[stages.VARIABLE], *STEPS, env=first)
        assert saved(out) == first[stages.VARIABLE]
        resumed = train(out, "--steps", "6", "--resume", "auto", *more, env=second)
        assert saved(resumed) == first[stages.VARIABLE]
        branch = train(tmp_path / f"{out.name}-branch", "--steps", "6", "--resume", out, *more, env=second)
        assert saved(branch) == first[stages.VARIABLE]


@pytest.mark.ci
def test_a_type_that_is_named_stays_and_auto_may_be_named(tmp_path):
    (tmp_path / "double.toml").write_text('dtype = "float64"\n')
    (tmp_path / "open.toml").write_text('[train]\ndtype = "auto"\n')
    assert saved(train(tmp_path / "a", "--config", tmp_path / "double.toml", *STEPS, env=BF16)) == "float64"
    assert saved(train(tmp_path / "b", "--config", tmp_path / "open.toml", *STEPS, env=BF16)) == "bfloat16"
    words = ("--config", tmp_path / "double.toml", "--dtype", "auto")
    assert saved(train(tmp_path / "c", *words, *STEPS, env=BF16)) == "bfloat16"
    assert saved(train(tmp_path / "d", "--dtype", "float32", *STEPS, env=BF16)) == "float32"


@pytest.mark.parametrize(
    "words",
    [
        "--reproducible-parts 2",
        "--deterministic",
        "--init {base}",
        "--init {base} --lora-rank 2",
        "--init {rounded} --lora-rank 2",
        "--depth 1 --seq-len 16 --batch-size 8",
    ],
)
def test_every_kind_of_run_takes_it(words, tmp_path, trained):
    rounded = tmp_path / "int8.safetensors"
    if "{rounded}" in words:
        quantize(trained / "weights.safetensors", rounded)
    words = words.format(base=trained, rounded=rounded).split()
    own = ["--data", "story", "--threads", "1"] if {"--init", "--depth"} & {*words} else SMALL
    result = inside("train", *own, *words, *STEPS, "--out", tmp_path / "run", env=BF16)
    assert result.returncode == 0, result.stderr
    assert saved(tmp_path / "run") == "bfloat16"


@pytest.mark.ci
@pytest.mark.ranks
@needs_mpi
def test_ranks_agree(tmp_path):
    for number, words in enumerate(("--grad-sync sharded", "--outer-every 2")):
        assert saved(train(tmp_path / str(number), *STEPS, *words.split(), ranks=2, env=BF16)) == "bfloat16"


@pytest.mark.ci
def test_within_measures_in_it(tmp_path):
    words = ("--within", "4s", "--data", "story", "--threads", "1", "--out", tmp_path / "run")
    result = distgpt("train", *words, env=BF16)
    assert result.returncode == 0, result.stderr
    assert saved(tmp_path / "run") == "bfloat16" and "--within: depth" in result.stdout


@pytest.mark.ci
def test_tuning_generation_and_python(tmp_path, trained, monkeypatch):
    monkeypatch.setenv(stages.VARIABLE, "bfloat16")
    (tmp_path / "chats.jsonl").write_text('{"text": "abc"}\n' * 4)
    base = train(tmp_path / "base", "--tokenizer", "byte", *STEPS)
    words = ("--weights", base, "--data", tmp_path / "chats.jsonl", "--out", tmp_path / "tuned")
    tuned = inside("tune", *words)
    assert tuned.returncode == 0, tuned.stderr
    assert saved(tmp_path / "tuned") == "bfloat16"
    stage, weights = open_stage("serial", 1), trained / "weights.safetensors"
    found = ModelSpec(weights, "auto").load(stage)
    assert found.dtype == "bfloat16" and found.model.kernels.dtype == BITS
    assert ModelSpec(weights, "float32").load(stage).dtype == "float32"
    quantize(weights, tmp_path / "small.safetensors")
    assert ModelSpec(tmp_path / "small.safetensors", "auto").load(stage).dtype == "int8"
    # What looks at a model, and judges it, stays exact.
    assert evaluate(stage, weights, val="story", val_tokens=64)["dtype"] == "float32"
    assert library.load(weights).parameters()["wte"].dtype == np.float32
    run = library.train(preset="tiny-adamw", n_layer=1, n_embd=16, n_head=1, seq_len=16, steps=2, out=tmp_path / "api")
    assert saved(run.directory) == "bfloat16"


def test_estimate_bench_and_compare_stages(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ("--preset", "tiny", "--n-layer", "1", "--n-embd", "16", "--n-head", "1", "--batch-size", "2")
    found = inside("estimate", *words, "--no-measure", "--json", env=BF16)
    assert json.loads(found.stdout)["dtype"] == "bfloat16", found.stderr
    found = inside("estimate", "--preset", "gpt2", "--stage", "cuda", "--no-measure", "--json", env=FREE)
    assert json.loads(found.stdout)["dtype"] == "bfloat16", found.stderr  # of the GPU that is imagined
    assert "--dtype [float32|" in inside("bench", "stages", "--help-all").stdout
    assert "default: auto" in " ".join(inside("train", "--help").stdout.split())


def test_a_sweep_decides_once(tmp_path):
    (tmp_path / "grid.toml").write_text(
        'preset = "tiny-adamw"\nn_layer = 1\nn_embd = 16\nn_head = 1\nseq_len = 16\n'
        "steps = 2\nbatch_size = 2\n"
        '[sweep]\nmetric = "loss"\nlr = [0.01]\n'
    )
    words = ("sweep", tmp_path / "grid.toml", "--threads", "1", "--out", tmp_path / "sweep")
    assert inside(*words, env=BF16).returncode == 0
    grid = (tmp_path / "grid.toml").read_text()
    (tmp_path / "grid.toml").write_text(grid.replace("[0.01]", "[0.01, 0.02]"))
    result = inside(*words, env=F32)
    assert result.returncode == 0, result.stderr
    runs = sorted((tmp_path / "sweep").glob("lr=*"))
    assert len(runs) == 2 and {saved(run) for run in runs} == {"bfloat16"}
    # One of an earlier version, whose grid has no dtype, computed in float32.
    before = json.loads((tmp_path / "sweep" / "grid.json").read_text())
    del before["fixed"]["dtype"]
    (tmp_path / "sweep" / "grid.json").write_text(json.dumps(before))
    (tmp_path / "grid.toml").write_text(grid.replace("[0.01]", "[0.01, 0.02, 0.03]"))
    assert inside(*words, env=BF16).returncode == 0
    assert saved(sorted((tmp_path / "sweep").glob("lr=*"))[-1]) == "float32"


def test_no_configuration_holds_it(tmp_path):
    with pytest.raises(UsageError, match="dtype"):
        RunConfig().with_values({"dtype": "auto"})
    result = inside("train", *SMALL, "--dtype", "float16", "--out", tmp_path / "none")
    assert result.returncode == 2 and "'auto'" in result.stderr
