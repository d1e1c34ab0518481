"""Signals during a run: the step is finished and saved, and the exit code is the signal's."""

import os
import pty
import re
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from distgpt.callbacks import attach
from distgpt.callbacks.attach import latest_step
from distgpt.cluster.launch.environment import job_end
from distgpt.core.base import interrupts
from distgpt.core.base.interrupts import EXIT_CODES, Interrupted, PendingSignals, deferred_signals, first_of
from distgpt.core.generate import sample
from distgpt.core.model.passes import Pass
from distgpt.core.saved.checkpoint import newest_step
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train import checkpoints
from distgpt.core.train.assessment import Scorer
from distgpt.core.train.step import Step
from stopping import at_call

from conftest import SMALL, clean_environment, command, inside, losses, metrics, same_signals, summary, validations

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
    "a sample": (sample, "choose", 3, 5),
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
