"""One-line notes for misleading launches and settings."""

import re
from types import SimpleNamespace

from distgpt.callbacks.forecast import Forecast
from distgpt.cluster.launch import job
from distgpt.core.base.errors import escape_model_text
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import TrainConfig
from distgpt.core.cpu.compiling import processor
from distgpt.core.cpu.compiling.processor import AVX2, AVX512, AVX512_BF16
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.stages import open_stage
from distgpt.core.generate.engine import sample
from distgpt.core.saved.checkpoint import Best
from distgpt.core.saved.modelfile import load_model
from distgpt.core.train.progress import Progress
from distgpt.recipes.within import outcome

from conftest import SMALL, inside, succeeded, summary


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
    def said(expected, made=100, reached=2.0, trained=2.0, minutes=1.0, predicted=None, windows=1000):
        forecast = object.__new__(Forecast)
        forecast.predicted = predicted
        run = SimpleNamespace(
            settings=TrainConfig(steps=100, train_minutes=minutes),
            callbacks=[forecast],
            batches=SimpleNamespace(windows_per_epoch=windows),
            progress=Progress(step=made, loss=trained),
            checkpoints=SimpleNamespace(best=reached and Best(reached, 9)),
            bits_per_byte=lambda loss: loss,
            report=SimpleNamespace(bits_per_byte=lambda loss: loss),
        )
        return outcome(expected, run)

    assert said(0.0) == said(0.0, made=60, minutes=0.0) == said(2.0, reached=None) == ""
    assert "other programs" in said(0.0, made=60) and "60 " in said(0.0, made=60)
    assert said(2.0) == "1.60 to 2.40 bits per byte, reached 2.00"
    assert said(3.0, predicted=(2.1, 0.1)) == "1.89 to 2.31 bits per byte, reached 2.00"
    assert said(2.0, reached=3.0, trained=3.0, windows=160).endswith("; the text was read 10.0 times")
    assert "held-out text differs" in said(2.0, reached=3.0) and "held-out text differs" not in said(2.0, made=60)
    assert "harder" in said(2.0, reached=3.0, trained=3.0)
    assert "harder" not in said(2.0, made=60, reached=3.0, trained=3.0)
