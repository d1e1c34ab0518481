"""Training in one process: files of a run, speed, memory, environment records, notes, and signals."""

import errno
import json
import math
import os
import platform
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from disks import names, raising
from distgpt.callbacks import attach
from distgpt.callbacks.attach import latest_step
from distgpt.callbacks.forecast import Forecast
from distgpt.cluster.launch import job
from distgpt.cluster.launch.environment import job_end
from distgpt.core.base import interrupts
from distgpt.core.base.errors import escape_model_text
from distgpt.core.base.interrupts import EXIT_CODES, Interrupted, PendingSignals, deferred_signals, first_of
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import RunConfig, TrainConfig, parse_toml
from distgpt.core.cpu.compiling import processor
from distgpt.core.cpu.compiling.processor import AVX2, AVX512, AVX512_BF16
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.stages import open_stage
from distgpt.core.generate import sample as sampling
from distgpt.core.generate.engine import sample
from distgpt.core.model.passes import Pass
from distgpt.core.saved.checkpoint import Best, newest_step
from distgpt.core.saved.modelfile import load_model, read_description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train import checkpoints
from distgpt.core.train.assessment import Scorer
from distgpt.core.train.progress import Progress
from distgpt.core.train.step import Step
from distgpt.measure.doctor import facts
from distgpt.measure.doctor.facts import anonymised, environment
from distgpt.recipes.within import outcome
from stopping import at_call

from conftest import (
    SMALL,
    clean_environment,
    command,
    distgpt,
    inside,
    losses,
    metrics,
    same_signals,
    succeeded,
    summary,
    validations,
)


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
        return outcome(expected, run)[1]

    assert said(0.0) == said(0.0, made=60, minutes=0.0) == said(2.0, reached=None) == ""
    assert "other programs" in said(0.0, made=60) and "60 " in said(0.0, made=60)
    assert said(2.0) == "1.60 to 2.40 bits per byte, reached 2.00"
    assert said(3.0, predicted=(2.1, 0.1)) == "1.89 to 2.31 bits per byte, reached 2.00"
    assert said(2.0, reached=3.0, trained=3.0, windows=160).endswith("; the text was read 10.0 times")
    assert "held-out text differs" in said(2.0, reached=3.0) and "held-out text differs" not in said(2.0, made=60)
    assert "harder" in said(2.0, reached=3.0, trained=3.0)
    assert "harder" not in said(2.0, made=60, reached=3.0, trained=3.0)


WORDS = [*SMALL, "--steps", "8", "--val-fraction", "0.1", "--eval-every", "2", "--sample-every", "4"]
WORDS += ["--save-every", "3", "--save", "sync"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    assert inside("train", *WORDS, "--out", out).returncode == 0
    return out


# The call during which the signal arrives, and the saved step.
MOMENTS = {
    "a step": (Step, "launch", 4, 4),
    "a step with an evaluation due": (Step, "launch", 6, 6),
    "an evaluation": (Scorer, "_losses", 3, 4),
    "a line of metrics": (RunDirectory, "record", 5, 4),
    "a sample": (sampling, "choose", 3, 5),
    "saving": (checkpoints, "save_checkpoint", 1, 4),
}


ENDINGS = [
    *((moment, signal.SIGTERM) for moment in MOMENTS),
    *(("a step", number) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)),
    *(("a step", number) for number in interrupts.ALIASES),
]


@pytest.mark.parametrize("moment, number", ENDINGS)
def test_run_that_a_signal_ends_resumes_identically(moment, number, finished, tmp_path, monkeypatch):
    owner, name, count, step = MOMENTS[moment]
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_call(patch, owner, name, count, number)
        ended = inside("train", *WORDS, "--out", out)
    number = interrupts.meaning(number)
    word = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    way = f"step {step} is saved; resume with --out {out} --resume auto"
    assert (ended.returncode, ended.stderr) == (EXIT_CODES[number], f"distgpt: {word}; {way}\n")
    assert max(metrics(out)) == newest_step(out / "checkpoints") == step and summary(out)["stop"] == "interrupted"
    assert inside("train", "--resume", out, "--threads", "1").returncode == 0
    assert losses(out) == losses(finished) and validations(out) == validations(finished)
    for name in ("weights", "best"):
        same = [(run / f"{name}.safetensors").read_bytes() for run in (out, finished)]
        assert same[0] == same[1]


@pytest.mark.parametrize(("owner", "name", "count", "is_done"), [
    (Scorer, "_losses", 1, False),  # first evaluation
    (Pass, "loss_and_gradients", 1, False),  # during compilation
    (Step, "launch", 8, True),
    (checkpoints, "save_checkpoint", 1, True),
    (checkpoints.Checkpoints, "write_weights", 1, True),
])  # fmt: skip
def test_signal_before_first_or_after_last_step(owner, name, count, is_done, tmp_path, monkeypatch):
    at_call(monkeypatch, owner, name, count, signal.SIGTERM)
    ended = inside("train", *(SMALL if is_done else WORDS), "--steps", "8", "--out", tmp_path / "run")
    assert ended.returncode == (0 if is_done else 143)
    if is_done:
        assert summary(tmp_path / "run")["stop"] == "finished"
    else:
        assert ended.stderr.startswith("distgpt: ended by SIGTERM") and not (tmp_path / "run").exists()


@pytest.mark.parametrize("every", [2, 0])
def test_last_evaluation_can_be_done_later(every, finished, tmp_path, monkeypatch):
    out, expected = tmp_path / "run", validations(finished)
    with monkeypatch.context() as patch:
        at_call(patch, Step, "launch", 8, signal.SIGUSR1)
        ended = inside("train", *WORDS, "--eval-every", str(every), "--out", out)
    assert ended.returncode == 75 and "step 8 is saved" in ended.stderr
    for _ in range(2):
        assert inside("train", "--resume", out, "--threads", "1").returncode == 0
        assert validations(out) == (expected if every else {8: expected[8]}) and (out / "best.safetensors").exists()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timing
def test_run_ends_before_its_time_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(attach, "LEAVING", 0.3)
    for limit, words in (("4s", "is saved; resume with"), ("0.1s", "nothing is saved yet")):
        begun, out = time.monotonic(), tmp_path / limit
        ended = inside("train", *WORDS, "--steps", "10000000", "--time-limit", limit, "--out", out)
        assert time.monotonic() - begun < float(limit[:-1]) + 2  # plus delays of a busy machine
        assert ended.returncode == 75 and ended.stderr.startswith("distgpt: time limit reached; ")
        assert words in ended.stderr
    assert newest_step(tmp_path / "4s" / "checkpoints") == max(metrics(tmp_path / "4s")) > 0


def test_last_step_and_checkpoint_fit_into_job_time():
    assert latest_step(1000.0, [], None, 2e9) == 1000 - 2 - 30
    assert latest_step(1000.0, [], None, 2e9, saves=2) == 1000 - 2 - 60
    assert latest_step(1000.0, [50.0, *[1.0] * 99], 4.0, 2e9) == 1000 - 2 - 6 - 100
    now = time.monotonic()
    for past in ("soon", "1700000000"):
        assert job_end(None, {}) is job_end(None, {"SLURM_JOB_END_TIME": past}) is None
    assert 59 < job_end(None, {"SLURM_JOB_END_TIME": str(int(time.time()) + 61)}) - now < 62
    assert 5 <= job_end(5.0, {"SLURM_JOB_END_TIME": "1"}) - now < 6
    ends = {"SLURM_JOB_END_TIME": str(int(time.time()) + 61), "DISTGPT_JOB_END": str(int(time.time()) + 31)}
    assert 29 < job_end(3600.0, ends) - now < 32  # the earliest end


def test_second_signal_exits_immediately(tmp_path, monkeypatch):
    monkeypatch.setattr(interrupts, "MEANT", -1.0)
    at_call(monkeypatch, Step, "launch", 6, signal.SIGTERM, times=2)
    ended = inside("train", *WORDS, "--save-every", "4", "--out", tmp_path / "run")
    assert ended.returncode == 143 and "step 4 is saved" in ended.stderr
    assert newest_step(tmp_path / "run" / "checkpoints") == 4 and max(metrics(tmp_path / "run")) == 5


def test_time_limit_counts_as_first_signal():
    found = PendingSignals()
    found.deadline = 0.0
    assert list(found.came) == [signal.SIGUSR1] and found.late and found.exit_code == 75
    assert found.note(signal.SIGUSR1) and not found.late and not found.note(signal.SIGUSR1)


def test_ranks_choose_the_strongest_signal():
    assert first_of([0, 0, 0, 0, 0]) is None
    assert first_of([0, 2, 0, 0, 1]) == signal.SIGINT and first_of([1, 2, 3, 0, 0]) == signal.SIGTERM
    assert list(EXIT_CODES.values()) == sorted(EXIT_CODES.values(), reverse=True)


def test_repeated_signals_of_a_launcher_count_once(monkeypatch):
    """Launchers repeat signals immediately, and Linux repeats SIGXCPU every second."""
    now = [100.0]
    monkeypatch.setattr(interrupts, "time", SimpleNamespace(monotonic=lambda: now[0]))
    with same_signals():
        interrupts.install_handlers()
        with deferred_signals(PendingSignals()) as found:
            for now[0] in (100.0, 110.0, 120.0):
                signal.raise_signal(signal.SIGXCPU)
            for _ in range(3):
                signal.raise_signal(signal.SIGTERM)
            assert list(found.came) == [signal.SIGUSR1, signal.SIGTERM] and found.exit_code == 143
        signal.raise_signal(signal.SIGTERM)
        with deferred_signals(found), pytest.raises(Interrupted):
            now[0] += 1.5
            signal.raise_signal(signal.SIGTERM)
        interrupts.install_handlers()  # another command
        with pytest.raises(Interrupted):
            signal.raise_signal(signal.SIGTERM)


@pytest.mark.ci
def test_closed_terminal_saves_or_is_ignored(tmp_path):
    """The run saves without output; under nohup it ignores SIGHUP and continues."""
    words = ["train", *SMALL, "--save-every", "1000000", "--out"]
    for ignored, code in ((False, 129), (True, 0)):
        out = tmp_path / str(code)
        pid, terminal = pty.fork()
        if pid == 0:
            signal.signal(signal.SIGHUP, signal.SIG_IGN if ignored else signal.SIG_DFL)
            steps = ["--steps", "400" if ignored else "1000000"]
            os.execve(sys.executable, command(*words, out, *steps), clean_environment(TERM="xterm"))
        shown = b""
        while not re.search(rb"step +[1-9]\d*/", shown):
            shown += os.read(terminal, 4096)
        os.close(terminal)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == code
        assert newest_step(out / "checkpoints") == max(metrics(out)) > 1
        assert summary(out)["stop"] == ("finished" if ignored else "interrupted")


@pytest.mark.ci
def test_long_deferred_signal_ends_the_process():
    """Compiling a loop defers signals, because an exception would break LLVM."""
    program = """if True:
        import time
        from distgpt.core.base import interrupts
        interrupts.install_handlers()
        interrupts.before_leaving.append(lambda: print(end=" cleaned up", flush=True))
        with interrupts.signals_deferred():
            print(end="ready", flush=True)
            time.sleep(60)"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=-1, stderr=-1) as process:
        assert process.stdout.read(5) == b"ready"
        begun = time.monotonic()
        process.terminate()
        assert process.wait(30) == 143 and process.stderr.read() == b"distgpt: ended by SIGTERM\n"
        assert 1 < time.monotonic() - begun < 10 and process.stdout.read() == b" cleaned up"
