"""Training in one process: files of a run, speed, memory and environment records, and one-line notes."""

import errno
import json
import math
import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from disks import names, raising
from distgpt.cluster.launch import job
from distgpt.core.base.errors import escape_model_text
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import RunConfig, TrainConfig, parse_toml
from distgpt.core.cpu.compiling import processor
from distgpt.core.cpu.compiling.processor import AVX2, AVX512, AVX512_BF16
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.stages import open_stage
from distgpt.core.generate.engine import sample
from distgpt.core.saved.checkpoint import Best
from distgpt.core.saved.modelfile import load_model, read_description
from distgpt.core.train.progress import Progress
from distgpt.measure.doctor import facts
from distgpt.measure.doctor.facts import anonymised, environment
from distgpt.recipes.within import outcome

from conftest import SMALL, distgpt, inside, losses, metrics, succeeded, summary


def test_run_directory_has_all_files(trained):
    files = {"config.toml", "tokenizer.json", "metrics.jsonl", "weights.safetensors", "summary.json"}
    assert names(trained) == sorted(files | {"checkpoints", "history.jsonl"})
    assert names(trained / "checkpoints") == ["step-00000010", "step-00000020", "step-00000030"]
    run = RunConfig().with_values(parse_toml((trained / "config.toml").read_text(), "config.toml"))
    assert (run.train.steps, run.train.lr, run.model.n_embd) == (30, 1e-2, 16)
    described = read_description(trained / "weights.safetensors")
    assert described.run == run and described.tokenizer.size == run.model.vocab_size


def test_saved_config_and_tokenizer_are_reusable(trained, tmp_path):
    again = ["--config", trained / "config.toml", "--out", tmp_path / "again", "--threads", "1"]
    assert inside("train", *again).returncode == 0
    one, other = ((run / "weights.safetensors").read_bytes() for run in (trained, tmp_path / "again"))
    assert one == other and losses(tmp_path / "again") == losses(trained)
    (text := tmp_path / "text.txt").write_text("the fox and the lamp by the sea. " * 9)
    saved = trained / "tokenizer.json"
    other = ["--data", text, "--tokenizer", saved, "--steps", "1", "--out", tmp_path / "other"]
    assert inside("train", *SMALL, *other).returncode == 0
    assert (tmp_path / "other" / "tokenizer.json").read_bytes() == saved.read_bytes()


def test_metrics_have_every_step(trained):
    steps = metrics(trained)
    assert list(steps) == list(range(1, 31))
    for step, line in steps.items():
        assert line["tokens"] == step * 8 * 16 and line["tokens_per_s"] * line["step_s"] == pytest.approx(8 * 16)
        assert all(math.isfinite(line[key]) for key in ("loss", "lr", "grad_norm"))
    assert steps[1]["lr"] == pytest.approx(5e-3) and steps[3]["lr"] == pytest.approx(1e-2)
    assert steps[30]["loss"] < steps[1]["loss"] - 0.5


@pytest.mark.ci
def test_live_display_survives_markup(tmp_path):
    (tmp_path / "text").write_text("[/a][b]" * 200)
    where = tmp_path / "[red]" / "[" / "]"
    args = [*SMALL, "--steps", "2", "--sample-every", "1", "--progress", "live", "--out", where]
    args += ["--data", tmp_path / "text", "--tokenizer", "char", "--resume", "auto"]
    assert "[red]" in succeeded("train", *args, by=distgpt).stdout.replace("\n", "")


def test_default_out_is_new_and_resume_finds_last(tmp_path):
    for steps, *resume in (("2",), ("3",), ("4", "--resume", "auto")):
        succeeded("train", *SMALL, "--steps", steps, *resume, cwd=tmp_path)
    assert names(tmp_path / "runs") == ["tiny-adamw", "tiny-adamw-2"]
    assert list(metrics(tmp_path / "runs" / "tiny-adamw-2")) == [1, 2, 3, 4]


def test_diverging_run_saves_nothing(tmp_path):
    for steps, lr, words in (("5", "1e30", "not finite at step 2"), ("1", "1e38", "weights")):
        args = ["--steps", steps, "--lr", lr, "--warmup", "0", "--clip", "0", "--out", tmp_path / steps]
        result = inside("train", *SMALL, *args)
        assert result.returncode == 76 and words in result.stderr and "Traceback" not in result.stderr
        assert not (tmp_path / steps / "weights.safetensors").exists(), words
        assert not (tmp_path / steps / "checkpoints").exists(), words


def test_summary_has_speed_and_memory(tmp_path):
    words = ["train", *SMALL, "--out", tmp_path / "run", "--steps"]
    assert inside(*words, "12", "--save-every", "12").returncode == 0
    found = summary(tmp_path / "run")
    lines = list(metrics(tmp_path / "run").values())
    assert (found["ranks"], found["threads"], found["steps"], found["stage"]) == (1, 1, 12, "serial")
    assert found["allreduce"] is None and found["peak_gpu_memory"] is None
    assert found["train_s"] == pytest.approx(sum(line["step_s"] for line in lines))
    assert found["tokens"] == lines[-1]["tokens"]
    seconds = sorted(line["step_s"] for line in lines[2:])
    assert found["step_s_median"] == pytest.approx((seconds[4] + seconds[5]) / 2)
    assert found["tokens_per_s"] == pytest.approx(8 * 16 / found["step_s_median"])
    assert len(found["peak_memory"]) == 1 and min(found["peak_memory"]) > 20 << 20
    assert inside(*words, "14", "--resume", "auto").returncode == 0  # reports its own steps
    assert summary(tmp_path / "run")["steps"] == 2


@pytest.mark.ci
def test_peak_memory_includes_freed_memory():
    hungry = """if True:
        from distgpt.core.comm.resources import peak_memory
        before = peak_memory()
        block = b"x" * 200_000_000
        del block
        print(before, peak_memory())
    """
    result = subprocess.run([sys.executable, "-c", hungry], capture_output=True, text=True, check=True)
    before, most = map(int, result.stdout.split())
    assert 200e6 < most < before + 210e6


def test_environment_record_is_anonymous(monkeypatch):
    words = ["train", "--data", "/home/me/my.txt", "--launcher", "/home/me/bin/mpirun --host n1,n2"]
    monkeypatch.setattr("sys.argv", ["/somewhere/bin/distgpt", *words])
    found = environment()
    assert found["command"] == "distgpt train --data my.txt --launcher 'mpirun --host …'"
    assert found["cores"] == len(os.sched_getaffinity(0))
    assert {"distgpt", "python", "numpy", "numba"} <= found["versions"].keys()
    text = json.dumps(found)
    for private in (platform.node(), str(Path.home()), "/home/me"):
        assert len(private) < 3 or private not in text


def test_installed_package_has_no_commit(monkeypatch):
    monkeypatch.setattr(facts, "_git", raising(OSError(errno.ENOENT, "no git")))
    found = environment()
    assert "commit" not in found and found["versions"]["distgpt"] and None not in found.values()


SHOWN = {
    "a/b.txt": "a/b.txt",
    "--out=/x/y": "--out=y",
    "/home/alice/mpich/bin/mpirun --map-by=core": "mpirun --map-by=core",
    "srun -w n[1-3] -H n4 --nodelist=n5 --hostfile hosts": "srun -w … -H … --nodelist=… --hostfile hosts",
    "../../home/alice/t.txt": "t.txt",
    "~/x": "x",
    "cannot read '/data/a/b': gone; 3 tokens/s": "cannot read 'b': gone; 3 tokens/s",
    "process 1 on node n7 exited": "process 1 on node … exited",
    "https://a.org/b/c": "https://a.org/b/c",
    "mine: gone, not mined": "…: gone, not mined",
}


def test_anonymised_hides_paths_and_hosts(monkeypatch):
    monkeypatch.setattr(platform, "node", lambda: "mine.cluster.org")
    assert {text: anonymised(text) for text in SHOWN} == SHOWN


def test_short_data_and_long_warmup_are_noted_once(tmp_path):
    (tmp_path / "short.txt").write_text("short text")
    (tmp_path / "long.jsonl").write_text('{"text": "the lamp was lit"}\n' * 40)  # a document each
    for name, text, few, long, documents in (("a", "short.txt", 1, 1, 0), ("b", "long.jsonl", 0, 0, 1)):
        words = ["--data", tmp_path / text, "--tokenizer", "byte", "--warmup", "4", "--steps", "3" if few else "4"]
        result = succeeded("train", *SMALL, "--out", tmp_path / name, *words)
        assert result.stdout.count("the training text has 10 tokens, fewer than seq_len + 1 =") == few
        assert result.stdout.count("--warmup 4 is longer than the run (3 steps)") == long
        assert result.stdout.count("(40 documents)") == documents
        assert "is also the training text" not in result.stdout


class Four(SerialComm):
    size = local_size = 4

    def __init__(self):
        self.cores = 0.5


def test_ranks_sharing_cores_are_noted_on_rank_0(monkeypatch):
    alike = lambda comm, data: [data] * comm.size  # noqa: E731
    monkeypatch.setattr(job, "gather", alike)

    def said(comm, name="mpi"):
        return job.LAUNCHED.notes(comm, name, 1, threads_given=True)

    (line,) = said(Four())
    assert line.startswith("4 ranks share 2 CPUs")
    comm = Four()
    comm.rank = 1
    assert not said(comm)
    (line,) = said(SerialComm())
    assert line.startswith("--stage mpi runs as one process; to start two: mpirun -n 2")
    assert not said(SerialComm(), "serial")


def test_slow_bfloat16_is_noted(monkeypatch):
    for shape, noted in ((AVX2, 1), (AVX512, 1), (AVX512_BF16, 0)):
        monkeypatch.setattr(processor, "shape", lambda shape=shape: shape)
        for dtype in ("float32", "bfloat16"):
            lines, stage = [], open_stage("serial", 1)
            stage.kernels(dtype)
            stage.notes.report_to(lines.append)
            slow = [line for line in lines if "with float32 instructions" in line]
            assert len(slow) == (noted if dtype == "bfloat16" else 0)


def test_end_of_run_shows_best_weights(tmp_path):
    (tmp_path / "ab.txt").write_text("ab" * 2000)
    (tmp_path / "z.txt").write_text("z" * 99)  # its loss rises in training
    more = "--tokenizer byte --schedule constant --eval-every 4 --steps 40 --dtype float32 --threads 1"
    words = [*more.split(), "--warmup", "0", "--data", tmp_path / "ab.txt", "--val", tmp_path / "z.txt"]
    shape = "--n-layer 1 --n-embd 16 --n-head 2 --seq-len 16 --batch-size 8 --lr 1e-2"
    ended = succeeded("train", *shape.split(), *words, "--out", tmp_path / "a")
    about = summary(tmp_path / "a")
    assert 1 < about["best_step"] < 40
    assert f"validation loss has risen since step {about['best_step']}" in ended.stdout
    best, described = load_model(tmp_path / "a" / "best.safetensors", CpuKernels("float32"), SerialComm())
    text = sample(best, described.tokenizer, 0, 240).strip()
    assert text in ended.stdout or escape_model_text(text) in ended.stdout
    assert re.search(r"^took +0:\d\d for 40 steps, [\d,]+ tokens/s", ended.stdout, re.MULTILINE)
    wrong = inside("train", *SMALL, *words, "--out", tmp_path / "b")
    assert wrong.returncode == 0 and "no improvement" in wrong.stdout


def test_outcome_compares_with_expected_loss():
    def said(expected, made=100, reached=2.0, trained=2.0, minutes=1.0):
        run = SimpleNamespace(
            settings=TrainConfig(steps=100, train_minutes=minutes),
            progress=Progress(step=made, loss=trained),
            checkpoints=SimpleNamespace(best=reached and Best(reached, 9)),
            bits_per_byte=lambda loss: loss,
            report=SimpleNamespace(bits_per_byte=lambda loss: loss),
        )
        return outcome(expected, run)

    assert said(0.0) == said(0.0, made=60, minutes=0.0) == said(2.0, reached=None) == ""
    assert "other programs" in said(0.0, made=60) and "60 " in said(0.0, made=60)
    assert said(2.0) == "1.80 to 2.20 bits per byte, reached 2.00"
    assert "held-out text differs" in said(2.0, reached=3.0) and "held-out text differs" not in said(2.0, made=60)
    assert "harder" in said(2.0, reached=3.0, trained=3.0)
    assert "harder" not in said(2.0, made=60, reached=3.0, trained=3.0)
