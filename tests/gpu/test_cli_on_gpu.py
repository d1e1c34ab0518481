import json
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from devices import ON_GPU, device, gpu, gpu_train, kernels  # noqa: F401
from distgpt.core.comm.api import SerialComm
from distgpt.core.config.presets import preset
from distgpt.core.config.run_request import RunRequest
from distgpt.core.cpu import stages
from distgpt.core.model.counts import BACKWARD, operations
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train.step import Step
from distgpt.gpu.stage import GpuStage
from distgpt.measure.estimate import Trial
from distgpt.measure.profile import operations as rows
from distgpt.measure.profile.session import Profiler, of_rank, peak_gflops, result
from distgpt.recipes import within
from distgpt.recipes.scaling import flops, text_to_learn_from

from conftest import inside, losses, metrics, needs_mpi, refused, train

STEPS = ("--steps", "4", "--save-every", "2", "--n-layer", "1", "--seq-len", "8")


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    return train(tmp_path_factory.mktemp("serial") / "run", *STEPS)


@pytest.mark.ci
@pytest.mark.parametrize("dtype,tolerance", [("float32", 1e-4), ("bfloat16", 2e-2)])
def test_gpu_training_matches_serial(dtype, tolerance, gpu, serial, tmp_path):
    result = gpu_train(gpu, tmp_path / "run", *STEPS, "--dtype", dtype)
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(serial), rtol=tolerance)
    assert "GPU 0" in result.stdout and (ON_GPU or ("slower" in result.stdout) == (dtype == "bfloat16")), result.stdout
    assert metrics(tmp_path / "run")[4]["grad_norm"] == pytest.approx(metrics(serial)[4]["grad_norm"], rel=0.1)


@pytest.mark.ranks
@pytest.mark.slow
@needs_mpi
def test_ranks_on_one_gpu_match_serial(gpu, tmp_path):
    words = ("--dtype", "float64", "--grad-accum", "2")
    alone = train(tmp_path / "serial", *STEPS, *words)
    words += ("--allreduce", "host")
    for sync, ranks in (("allreduce", 2), ("sharded", 2), ("allreduce", 1)):
        out = tmp_path / f"{sync}-{ranks}"
        result = gpu_train(gpu, out, *STEPS, *words, "--grad-sync", sync, ranks=ranks)
        np.testing.assert_allclose(losses(out), losses(alone), rtol=1e-12, err_msg=f"{sync}, {ranks} ranks")
        if ranks > 1:
            assert "2 ranks share this GPU" in result.stdout and "with host" in result.stdout
    words = (*words[:-2], "--outer-every", "2", "--schedule", "constant")
    cpu = train(tmp_path / "cpu", *STEPS, *words, "--steps", "6", ranks=2)
    gpu_train(gpu, tmp_path / "gpu", *STEPS, *words, "--allreduce", "host", ranks=2)
    moved = train(tmp_path / "gpu", *STEPS, *words, "--steps", "6", "--resume", "auto", ranks=2)
    np.testing.assert_allclose(losses(moved), losses(cpu), rtol=1e-12)


@pytest.mark.ci
def test_run_moves_between_cpu_and_gpu(gpu, serial, tmp_path):
    out = tmp_path / "moving"
    shutil.copytree(serial, out)
    shutil.rmtree(out / "checkpoints" / sorted(p.name for p in (out / "checkpoints").iterdir())[-1])
    gpu_train(gpu, out, *STEPS, "--resume", "auto")
    np.testing.assert_allclose(losses(out), losses(serial), rtol=1e-4)
    gpu_train(gpu, tmp_path / "low", *STEPS, "--steps", "2", "--dtype", "bfloat16")
    train(tmp_path / "low", *STEPS, "--dtype", "float32", "--resume", "auto")
    assert losses(tmp_path / "low")[-1] < losses(tmp_path / "low")[0]


@pytest.mark.ci
def test_gpu_inference_matches_serial(gpu, serial):
    args = ("infer", "--weights", serial / "weights.safetensors", "--max-new-tokens", "24", "--json", "--dtype")
    results = [inside(*args, "float32"), *(gpu(*args, dtype, "--stage", "cuda") for dtype in ("float32", "bfloat16"))]
    tokens = [json.loads(result.stdout)["tokens"] for result in results]
    assert tokens[0] == tokens[1] and len(tokens[2]) == 24


@pytest.mark.ci
@pytest.mark.parametrize(
    ("words", "dtype"), [("", "bfloat16"), ("--dtype float32", "float32"), ("--tf32", "float32")], ids=str
)
def test_gpu_defaults_to_bfloat16(words, dtype, gpu, tmp_path, monkeypatch):
    monkeypatch.delenv(stages.VARIABLE)
    found = gpu_train(gpu, tmp_path, *STEPS, "--steps", "1", *words.split())
    assert RunDirectory(tmp_path).saved().train.dtype == dtype
    assert ("bfloat16: this GPU has tensor cores" in found.stdout) == (not words)


def chosen_within(monkeypatch, seconds, cold):
    """Choose a depth by the clock; return the measurements and the choice.

    The GPU's first steps take `cold` seconds. It is idle up to depth 8, and limited by arithmetic above.
    """
    text, now, measured = text_to_learn_from(34e6), [1000.0], []

    def speed(stage, run):
        assert run.train.dtype == "bfloat16"  # like the run
        depth, first = run.model.n_layer, not measured
        measured.append((depth, run.train.batch_size * run.model.seq_len))
        now[0] += cold * first + 2
        return 1e6 * min(1.0, flops(8, text) / flops(depth, text)), cold * first

    monkeypatch.delenv(stages.VARIABLE, raising=False)
    monkeypatch.setattr(within, "measured_speed", speed)
    monkeypatch.setattr(within, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stage = GpuStage("cuda", SerialComm(), 0, device=SimpleNamespace(capability=(9, 0)), begun=1000.0)
    choice, _ = within.measured_choice(RunRequest(), stage, seconds, text, 1, lambda text: None)
    return measured, choice


def test_within_measures_a_warm_gpu_twice(monkeypatch):
    measured, choice = chosen_within(monkeypatch, 300, 25)
    assert [depth for depth, _ in measured[:2]] == [4, 12] and choice.depth > 8
    assert min(tokens for _, tokens in measured[:2]) >= 1 << 13
    # The second probe is skipped if the first took most of the time.
    assert len(chosen_within(monkeypatch, 60, 25)[0]) >= 2 and len(chosen_within(monkeypatch, 5, 1)[0]) == 1


@pytest.mark.parametrize(
    ("words", "named"), [("--threads 2", ("--threads",)), ("--n-layer 20 --n-embd 4096 --steps 1", ("GPU 0", "GiB"))]
)
def test_invalid_gpu_options_are_rejected_before_start(words, named, gpu, tmp_path):
    refused(gpu("train", "--stage", "cuda", *words.split(), "--out", tmp_path / "run"), 2, *named)
    assert not (tmp_path / "run").exists()


@pytest.mark.ci
@pytest.mark.ranks
@needs_mpi
def test_allreduce_bench_times_every_exchange(gpu, tmp_path):
    words = ["bench", "allreduce", "--stage", "mpi-cuda"]
    few = ["--sizes", "8,70000", "--repeats", "3", "--seconds", "5", "--out", tmp_path, "--json"]
    result = gpu(*words, *few, ranks=2)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    saved = json.loads((tmp_path / "allreduce-mpi-cuda-2.json").read_text())
    assert found == {key: value for key, value in saved.items() if key in found}
    timed = {row["algorithm"] for row in found["rows"]}
    assert "host" in timed and timed | found["left_out"].keys() == {"nccl", "host"}
    assert {row["bytes"] for row in found["rows"]} == {8, 70000}
    assert all(row["seconds"] > 0 for row in found["rows"])
    assert ON_GPU or "a GPU per rank" in found["left_out"]["nccl"]
    result = gpu(*words, "--algorithms", "allreduce", ranks=2)
    assert result.returncode == 2 and "nccl, host" in result.stderr


@pytest.mark.skipif(ON_GPU, reason="changes the weights in this process")
@pytest.mark.parametrize("how", ["", "--set spike_zscore=9", pytest.param("--save sync", marks=pytest.mark.slow)])
def test_bad_step_is_rolled_back(how, gpu, tmp_path, monkeypatch):
    """The next step is already queued when the result is read; with outlier detection it is not."""
    launch, ruined = Step.launch, []

    def launched(self, step, batches, *flags):
        if step == 3 and not ruined:
            ruined.append(step)
            flat = self.model.weights.flat
            self.model.kernels.put(flat, np.full(flat.shape, np.nan, np.float32))
            self.model.refresh()
        return launch(self, step, batches, *flags)

    monkeypatch.setattr(Step, "launch", launched)
    words = [*STEPS, "--steps", "6", "--on-bad-step", "rollback", *how.split()]
    result = gpu_train(gpu, tmp_path / "run", *words)
    assert "is not finite at step 4: rolled back to step 2" in result.stdout
    assert list(metrics(tmp_path / "run")) == list(range(1, 7)) and None not in losses(tmp_path / "run")


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
