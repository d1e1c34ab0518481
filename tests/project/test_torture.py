"""benchmarks/torture.py does what it reports, and notices what it looks for."""

import errno
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from torturing import attempts, faults, preload, table, trials
from torturing.attempts import Attempt
from torturing.faults import CHOICES, EVERY, STEPS, Campaign, Fault, Mode
from torturing.invariants import Seen, after_attempt, at_the_end, look

from conftest import MPIRUN, clean_environment, inside

SERIAL, MPI = Mode("serial"), Mode("mpi", 2)
CAMPAIGN = Campaign(7, ("serial", "mpi"), tuple(CHOICES), {"save": 50, "elsewhere": 50, "start": 50})
KILLED = Attempt(Fault("signal", "SIGKILL"), 1, code=-9, came=1.0)
ASKED = Attempt(Fault("signal", "SIGTERM"), 1, code=143, came=1.0, errors="distgpt: ended by SIGTERM\n")

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def test_a_trial_is_a_function_of_seed_and_number():
    first = [CAMPAIGN.trial(number) for number in range(200)]
    assert first == [replace(CAMPAIGN).trial(number) for number in range(200)]
    assert first != [replace(CAMPAIGN, seed=8).trial(number) for number in range(200)]
    assert {trial.kind for trial in first} == set(CHOICES)
    assert {trial.mode for trial in first} == {"serial", "mpi"}
    only = replace(CAMPAIGN, kinds=("kill in a save",), calls={"save": 13, "elsewhere": 13, "start": 13})
    assert {only.trial(number).faults[-1].turn for number in range(13)} == {*range(13)}


WRITING = """if True:
    import os
    for name in ("outside", "below/one", "below/two"):
        file = os.open(name, os.O_WRONLY | os.O_CREAT)
        try:
            print(end=f"{os.write(file, b'0123456789')} ", flush=True)
        except OSError as error:
            print(end=f"{error.errno} ", flush=True)
        os.close(file)
    os.rename("below/two", "below/three")
"""


@pytest.mark.ci
@needs_compiler
def test_the_library_fails_calls_tears_and_kills(tmp_path):
    """The program calls open, write, close, open, write, close and rename in the folder that is watched."""
    library = preload.compiled(tmp_path)
    for name, turn, found, code in (
        ("ENOSPC", 1, ["10", str(errno.ENOSPC), "10"], 0),
        ("short", 1, ["10", "5", "10"], 0),
        ("torn", 4, ["10", "10"], -9),
    ):
        folder, fault = tmp_path / name, Fault("error", name, where="save", turn=turn, times=1)
        (folder / "below").mkdir(parents=True)
        (folder / "state").mkdir()
        survey = preload.Survey(1.0, 1000, [*range(1, 8)], [], 0)
        told = preload.environment(library, folder / "below", folder / "state", fault, survey)
        words = [sys.executable, "-S", "-c", WRITING.replace('"below', f'"{folder}/below')]
        done = subprocess.run(words, env=clean_environment(**told), cwd=folder, capture_output=True, text=True)
        assert (done.stdout.split(), done.returncode) == (found, code), name
        assert (folder / "state" / "hit").exists() and (folder / "below" / "three").exists() == (code == 0)
    assert (folder / "below" / "two").read_bytes() == b"01234"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The directory of a trial's run without faults."""
    place = attempts.Place(tmp_path_factory.mktemp("whole") / "trial")
    place.make()
    words = attempts.command(place, SERIAL, 1, {})
    result = inside(*words[words.index("train") :])
    assert result.returncode == 0, result.stderr
    return place.run


@pytest.fixture
def run(whole, tmp_path):
    return Path(shutil.copytree(whole, tmp_path / "run"))


def names_of(found):
    return {line.partition(":")[0] for line in found}


def flip(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)


def metrics(change):
    """A function that rewrites a run's metrics."""

    def act(run):
        file = run / "metrics.jsonl"
        file.write_text("".join(change(file.read_text().splitlines(keepends=True))))

    return act


def summary(**changes):
    """A function that changes a run's summary."""

    def act(run):
        file = run / "summary.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | changes))

    return act


LAST = f"checkpoints/step-{STEPS:08}"
PLANTED = {
    "a step twice": (metrics(lambda lines: lines + lines[-2:]), "twice"),
    "no last step": (metrics(lambda lines: lines[:-2]), "steps"),
    "a line in two": (metrics(lambda lines: [lines[0][:9], "\n", *lines]), "torn"),
    "another loss": (metrics(lambda lines: [line.replace("1", "2") for line in lines]), "losses"),
    "torn weights": (lambda run: flip(run / "weights.safetensors"), "torn"),
    "no checkpoint": (lambda run: shutil.rmtree(run / LAST), "checkpoints"),
    "other weights": (lambda run: (run / "weights.safetensors").write_bytes(b""), "weights"),
    "a leaked file": (lambda run: (run / ".config.toml.0.tmp").touch(), "leaked"),
    "a holder": (lambda run: (run / "running.json").write_text("{}"), "leaked"),
    "another best step": (summary(best_step=4), "best"),
    "stopped": (lambda run: (run / "summary.json").write_text('{"stop": "failed"}'), "summary"),
}


def test_whatever_is_wrong_at_the_end_is_noticed(run, whole):
    assert at_the_end(run, whole, faults.MODES[0], True) == []
    assert after_attempt(SERIAL, Attempt(Fault("nothing"), 1), Seen(), look(run)) == []
    for what, (plant, name) in PLANTED.items():
        plant(run)
        assert name in names_of(at_the_end(run, whole, faults.MODES[0], True)), what
        shutil.rmtree(run)
        shutil.copytree(whole, run)


def test_a_wrong_end_is_noticed_and_a_documented_one_is_not(run):
    for mode, done, name in (
        (SERIAL, replace(KILLED, code=1), "exit code"),
        (MPI, replace(ASKED, ranks=2, code=15), "exit code"),
        (SERIAL, replace(ASKED, errors=""), "no word"),
        (SERIAL, replace(ASKED, errors="distgpt: internal error\nTraceback (most"), "traceback"),
        (SERIAL, replace(KILLED, hung=True), "hang"),
        (SERIAL, replace(KILLED, left=["python -m distgpt train"]), "left behind"),
        (SERIAL, KILLED, None),
        (SERIAL, ASKED, None),
        (MPI, replace(ASKED, ranks=2, code=15, early=True), None),
        (SERIAL, Attempt(Fault("twice"), 1, second=2), None),
    ):
        found = names_of(after_attempt(mode, done, Seen(), look(run)))
        assert name in found if name else not found, done


def test_a_full_disk_that_cost_the_end_is_noticed(run):
    full = Attempt(Fault("full"), 1, code=74, errors="distgpt: No space left on device\n")
    assert names_of(after_attempt(SERIAL, full, Seen(), look(run))) == {"hoarded"}
    assert not after_attempt(replace(SERIAL, goes_on=False), full, Seen(), look(run))
    for path in sorted((run / "checkpoints").iterdir())[:-1]:
        shutil.rmtree(path)
    assert not after_attempt(SERIAL, full, Seen(), look(run))
    (run / "weights.safetensors").unlink()
    assert names_of(after_attempt(SERIAL, full, Seen(), look(run))) == {"no result"}


def test_best_weights_older_than_a_checkpoint_says_are_noticed(run):
    seen = look(run)
    assert seen.best == STEPS == seen.best_said[STEPS]
    assert names_of(after_attempt(SERIAL, KILLED, seen, replace(seen, best=8))) == {"best"}


def test_lost_steps_and_older_checkpoints_are_noticed(run):
    before = look(run)
    shutil.rmtree(run / LAST)
    seen = look(run)
    assert (seen.step, seen.newest) == (STEPS, STEPS - EVERY)
    assert names_of(after_attempt(SERIAL, ASKED, Seen(), seen)) == {"lost"}
    assert after_attempt(SERIAL, KILLED, Seen(), seen) == []
    assert names_of(after_attempt(SERIAL, KILLED, before, seen)) == {"lost"}


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@needs_compiler
def test_two_trials_and_one_more_resumed(tmp_path):
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
