"""benchmarks/torture.py detects planted errors; short fuzzing of loaders and ranks."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from torturing import attempts, faults, table, trials
from torturing.attempts import Attempt
from torturing.faults import CHOICES, STEPS, Campaign, Fault, Mode
from torturing.invariants import Seen, after_attempt, at_the_end, look

from conftest import MPIRUN, TESTS, slow_ranks, succeeded

SERIAL, MPI = Mode("serial"), Mode("mpi", 2)
CAMPAIGN = Campaign(7, ("serial", "mpi"), tuple(CHOICES), {"save": 50, "elsewhere": 50, "start": 50})
KILLED = Attempt(Fault("signal", "SIGKILL"), 1, code=-9, came=1.0)
ASKED = Attempt(Fault("signal", "SIGTERM"), 1, code=143, came=1.0, errors="distgpt: ended by SIGTERM\n")

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def test_trial_depends_only_on_seed_and_number():
    first = [CAMPAIGN.trial(number) for number in range(200)]
    assert first == [replace(CAMPAIGN).trial(number) for number in range(200)]
    assert first != [replace(CAMPAIGN, seed=8).trial(number) for number in range(200)]
    assert {trial.kind for trial in first} == set(CHOICES) and {trial.mode for trial in first} == {"serial", "mpi"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    place = attempts.Place(tmp_path_factory.mktemp("whole") / "trial")
    place.make()
    words = attempts.command(place, SERIAL, 1, {})
    succeeded(*words[words.index("train") :])
    return place.run


@pytest.fixture
def run(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "run"))


def names_of(found):
    return {line.partition(":")[0] for line in found}


def changed(name, change):
    def act(run):
        (run / name).write_bytes(b"".join(change((run / name).read_bytes().splitlines(keepends=True))))

    return act


METRICS = partial(changed, "metrics.jsonl")
PLANTED = {
    "a step twice": (METRICS(lambda lines: lines + lines[-2:]), "twice"),
    "a line in two": (METRICS(lambda lines: [lines[0][:9], b"\n", *lines]), "torn"),
    "another loss": (METRICS(lambda lines: [line.replace(b"1", b"2") for line in lines]), "losses"),
    "no common checkpoints": (lambda run: shutil.rmtree(run / f"checkpoints/step-{STEPS:08}"), "checkpoints"),
    "other weights": (changed("weights.safetensors", lambda lines: [b"{}"]), "weights"),
    "a leaked file": (lambda run: (run / ".config.toml.0.tmp").touch(), "leaked"),
    "stopped": (
        changed("summary.json", lambda lines: [line.replace(b"finished", b"failed") for line in lines]),
        "summary",
    ),
}


@pytest.mark.parametrize("what", PLANTED)
def test_wrong_end_state_is_detected(what, run, whole):
    plant, name = PLANTED[what]
    assert at_the_end(run, whole, faults.MODES[0], True) == []
    assert after_attempt(SERIAL, Attempt(Fault("nothing"), 1), Seen(), look(run)) == []
    plant(run)
    assert name in names_of(at_the_end(run, whole, faults.MODES[0], True))


def test_undocumented_ends_are_detected(run):
    for mode, done, name in (
        (SERIAL, replace(KILLED, code=1), "exit code"),
        (SERIAL, replace(ASKED, errors=""), "no word"),
        (SERIAL, replace(KILLED, hung=True), "hang"),
        (SERIAL, replace(KILLED, left=["python -m distgpt train"]), "left behind"),
        (SERIAL, KILLED, None),
        (MPI, replace(ASKED, ranks=2, code=15, early=True), None),
    ):
        found = names_of(after_attempt(mode, done, Seen(), look(run)))
        assert name in found if name else not found, done


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@needs_compiler
def test_trials_run_and_resume(tmp_path):
    out = tmp_path / "file.jsonl"
    words = [sys.executable, str(Path(trials.__file__).parents[1] / "torture.py"), "--out", str(out)]
    words += ["--kinds", "kill in a save,error in a save,signal in a save"]
    words += ["--modes", "serial;mpi" if MPIRUN else "serial"]
    for more in (["--trials", "2"], ["--trials", "3", "--resume"]):
        done = subprocess.run([*words, *more], capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
    _, rows = table.read(out)
    assert [(row["trial"], row["wrong"]) for row in rows] == [(0, []), (1, []), (2, [])]
    assert "Nothing was wrong" in done.stdout and sum(len(row["attempts"]) for row in rows) > 3


FUZZ = TESTS / "fuzz" / "run.py"


@slow_ranks
@pytest.mark.xdist_group("ranks")
def test_failed_rank_in_collective_ends_the_job():
    words = [sys.executable, str(FUZZ.with_name("collectives.py")), "--only", "overlapped", "--every", "60"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    # One case in 60; the total depends on the number of collectives.
    cases = re.search(r"(\d+) cases, 0 failures", done.stdout)
    assert done.returncode == 0 and cases and int(cases[1]) >= 3, done.stdout + done.stderr


@pytest.mark.slow
def test_corrupt_files_do_no_harm():
    words = [sys.executable, str(FUZZ), "--cases", "1000", "--seconds", "8"]  # startup takes twice as long
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    cases = int(re.search(r"(\d+) cases, 0 failures", done.stdout)[1])
    assert cases >= 50, "the targets were hardly reached"
