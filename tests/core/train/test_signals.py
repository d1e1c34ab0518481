"""A signal during a run: the step is finished, saved, and the command leaves with the code of the signal."""

import json
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

from conftest import SMALL, clean_environment, command, inside, losses, metrics, same_signals

WORDS = [*SMALL, "--steps", "8", "--val-fraction", "0.1", "--eval-every", "2", "--sample-every", "4"]
WORDS += ["--save-every", "3", "--save", "sync"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished") / "run"
    assert inside("train", *WORDS, "--out", out).returncode == 0
    return out


def evaluations(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    found = [(line["step"], line["val_loss"]) for line in lines if "val_loss" in line]
    assert len(dict(found)) == len(found), "an evaluation was logged twice"
    return dict(found)


# Where the signal comes, and the step that is saved then.
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
def test_what_a_signal_ends_resumes_as_if_it_had_not_come(moment, number, finished, tmp_path, monkeypatch):
    owner, name, count, step = MOMENTS[moment]
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        at_call(patch, owner, name, count, number)
        ended = inside("train", *WORDS, "--out", out)
    number = interrupts.meaning(number)
    word = "interrupted" if number == signal.SIGINT else f"ended by {number.name}"
    way = f"step {step} is saved; resume with --out {out} --resume auto"
    assert (ended.returncode, ended.stderr) == (EXIT_CODES[number], f"distgpt: {word}; {way}\n")
    assert max(metrics(out)) == newest_step(out / "checkpoints") == step
    assert json.loads((out / "summary.json").read_text())["stop"] == "interrupted"
    assert inside("train", "--resume", out, "--threads", "1").returncode == 0
    assert losses(out) == losses(finished) and evaluations(out) == evaluations(finished)
    for name in ("weights", "best"):
        same = [(run / f"{name}.safetensors").read_bytes() for run in (out, finished)]
        assert same[0] == same[1]


@pytest.mark.parametrize(
    ("owner", "name", "count", "is_done"),
    [
        (Scorer, "_losses", 1, False),  # in the first evaluation
        (Pass, "loss_and_gradients", 1, False),  # while the loops are compiled
        (Step, "launch", 8, True),
        (checkpoints, "save_checkpoint", 1, True),
        (checkpoints.Checkpoints, "write_weights", 1, True),
    ],
)
def test_a_signal_before_the_first_step_leaves_nothing_and_one_after_the_last_ends_nothing(
    owner, name, count, is_done, tmp_path, monkeypatch
):
    at_call(monkeypatch, owner, name, count, signal.SIGTERM)
    ended = inside("train", *(SMALL if is_done else WORDS), "--steps", "8", "--out", tmp_path / "run")
    assert ended.returncode == (0 if is_done else 143)
    if is_done:
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["stop"] == "finished"
    else:
        assert ended.stderr.startswith("distgpt: ended by SIGTERM") and not (tmp_path / "run").exists()


@pytest.mark.parametrize("every", [2, 0])
def test_the_last_evaluation_can_be_done_later(every, finished, tmp_path, monkeypatch):
    """Once, however often the run resumes from there."""
    out, expected = tmp_path / "run", evaluations(finished)
    with monkeypatch.context() as patch:
        at_call(patch, Step, "launch", 8, signal.SIGUSR1)
        ended = inside("train", *WORDS, "--eval-every", str(every), "--out", out)
    assert ended.returncode == 75 and "step 8 is saved" in ended.stderr
    for _ in range(2):
        assert inside("train", "--resume", out, "--threads", "1").returncode == 0
        assert evaluations(out) == (expected if every else {8: expected[8]})
        assert (out / "best.safetensors").exists()


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.timing
def test_a_run_is_gone_before_its_time_is_up(tmp_path, monkeypatch):
    monkeypatch.setattr(attach, "LEAVING", 0.3)
    for limit, words in (("4s", "is saved; resume with"), ("0.1s", "nothing is saved yet")):
        begun, out = time.monotonic(), tmp_path / limit
        ended = inside("train", *WORDS, "--steps", "10000000", "--time-limit", limit, "--out", out)
        assert time.monotonic() - begun < float(limit[:-1]) + 2  # and what a busy machine adds
        assert ended.returncode == 75 and ended.stderr.startswith("distgpt: time limit reached; ")
        assert words in ended.stderr
    saved = newest_step(tmp_path / "4s" / "checkpoints")
    assert saved == max(metrics(tmp_path / "4s")) > 0


def test_slurm_says_when_a_job_ends_and_the_last_step_and_checkpoint_fit_into_the_time():
    assert latest_step(1000.0, [], None, 2e9) == 1000 - 2 - 30
    assert latest_step(1000.0, [], None, 2e9, saves=2) == 1000 - 2 - 60
    assert latest_step(1000.0, [50.0, *[1.0] * 99], 4.0, 2e9) == 1000 - 2 - 6 - 100
    now = time.monotonic()
    for past in ("soon", "1700000000"):
        assert job_end(None, {}) is job_end(None, {"SLURM_JOB_END_TIME": past}) is None
    assert 59 < job_end(None, {"SLURM_JOB_END_TIME": str(int(time.time()) + 61)}) - now < 62
    assert 5 <= job_end(5.0, {"SLURM_JOB_END_TIME": "1"}) - now < 6
    ends = {"SLURM_JOB_END_TIME": str(int(time.time()) + 61), "DISTGPT_JOB_END": str(int(time.time()) + 31)}
    assert 29 < job_end(3600.0, ends) - now < 32  # the first of all


def test_a_second_signal_leaves_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(interrupts, "MEANT", -1.0)
    at_call(monkeypatch, Step, "launch", 6, signal.SIGTERM, times=2)
    ended = inside("train", *WORDS, "--save-every", "4", "--out", tmp_path / "run")
    assert ended.returncode == 143 and "step 4 is saved" in ended.stderr
    assert newest_step(tmp_path / "run" / "checkpoints") == 4 and max(metrics(tmp_path / "run")) == 5


def test_a_signal_that_comes_when_the_time_is_up_is_the_first_of_its_kind():
    found = PendingSignals()
    found.deadline = 0.0
    assert list(found.came) == [signal.SIGUSR1] and found.late and found.exit_code == 75
    assert found.note(signal.SIGUSR1) and not found.late and not found.note(signal.SIGUSR1)


def test_all_ranks_find_the_signal_that_counts_most():
    assert first_of([0, 0, 0, 0, 0]) is None
    assert first_of([0, 2, 0, 0, 1]) == signal.SIGINT and first_of([1, 2, 3, 0, 0]) == signal.SIGTERM
    assert list(EXIT_CODES.values()) == sorted(EXIT_CODES.values(), reverse=True)


def test_a_signal_that_a_launcher_repeats_is_one(monkeypatch):
    """At once, also after the run has saved. The limit of CPU time is told every second."""
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
def test_a_terminal_that_is_closed(tmp_path):
    """The run saves, though it can no longer say so; one that ignores SIGHUP, as under nohup, goes on."""
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
        stop = json.loads((out / "summary.json").read_text())["stop"]
        assert stop == ("finished" if ignored else "interrupted")


@pytest.mark.ci
def test_what_takes_long_to_hold_a_signal_is_left_at_once():
    """As compiling a loop, where an exception would break LLVM."""
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
