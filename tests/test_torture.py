"""benchmarks/torture.py does what it reports, and notices what it looks for."""

import errno
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import MPIRUN, clean_environment, inside
from torturing import attempts, faults, preload, table, trials
from torturing.attempts import Attempt
from torturing.faults import CHOICES, EVERY, STEPS, Campaign, Damage, Fault, Mode
from torturing.invariants import Seen, after_attempt, at_the_end, look

SERIAL, MPI = Mode("serial"), Mode("mpi", 2)
CAMPAIGN = Campaign(7, ("serial", "mpi"), tuple(CHOICES), {"save": 50, "elsewhere": 50, "start": 50})
KILLED = Attempt(Fault("signal", "SIGKILL"), 1, code=-9, came=1.0)
ASKED = Attempt(Fault("signal", "SIGTERM"), 1, code=143, came=1.0, errors="distgpt: ended by SIGTERM\n")
FAILED = Attempt(Fault("error", "ENOSPC"), 1, code=74, came=1.0, errors="distgpt: cannot write x: full\n")

needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


def test_a_trial_is_a_function_of_seed_and_number():
    first = [CAMPAIGN.trial(number) for number in range(200)]
    assert first == [replace(CAMPAIGN).trial(number) for number in range(200)]
    assert first != [replace(CAMPAIGN, seed=8).trial(number) for number in range(200)]
    assert {trial.kind for trial in first} == set(CHOICES)
    assert {trial.mode for trial in first} == {"serial", "mpi"}
    # Every call of a save has its turn, in every way, after as many rounds as there are ways.
    for kind, ways in (("kill in a save", 5), ("error in a save", 20), ("signal in a save", 15)):
        only = replace(CAMPAIGN, kinds=(kind,), calls={"save": 13, "elsewhere": 13, "start": 13})
        seen = [only.trial(number) for number in range(13 * ways)]
        assert {trial.faults[-1].turn for trial in seen[:13]} == {*range(13)}, kind
        last = [(trial.mode, trial.faults[-1]) for trial in seen]
        assert len({(mode, f.name, f.to, f.times, f.turn % 13) for mode, f in last}) == len(seen), kind


# The library that fails system calls


WRITING = """if True:
    import os, sys, time
    print(end=f"{time.time():.0f} ", flush=True)
    for name in ("outside", "below/one", "below/two"):
        file = os.open(name, os.O_WRONLY | os.O_CREAT)
        try:
            print(end=f"{os.write(file, b'0123456789')} ", flush=True)
            os.fsync(file)
        except OSError as error:
            print(end=f"{error.errno} ", flush=True)
        os.close(file)
    os.rename("below/two", "below/three")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    return preload.compiled(tmp_path_factory.mktemp("library"))


def written(library, folder, fault):
    """The output of this program, its exit code, its clock. It calls open, write, fsync, close, …, rename."""
    (folder / "below").mkdir(parents=True)
    (folder / "state").mkdir()
    survey = preload.Survey(1.0, 1000, [*range(1, 10)], [], 0)
    told = preload.environment(library, folder / "below", folder / "state", fault, survey)
    program = WRITING.replace('"below', f'"{folder}/below')
    words = [sys.executable, "-S", "-c", program]
    done = subprocess.run(words, env=clean_environment(**told), cwd=folder, capture_output=True, text=True)
    return done.stdout.split()[1:], done.returncode, int(done.stdout.split()[0])


@needs_compiler
def test_the_library_fails_calls_kills_tears_and_moves_the_clock(library, tmp_path):
    for name, turn, found in (
        ("ENOSPC", 1, ["10", str(errno.ENOSPC), "10"]),
        ("EIO", 2, ["10", "10", str(errno.EIO), "10"]),  # written, and not synced
        ("short", 1, ["10", "5", "10"]),
    ):
        fault = Fault("error", name, where="save", turn=turn, times=1)
        assert written(library, tmp_path / name, fault)[:2] == (found, 0)
        state, below = tmp_path / name / "state", tmp_path / name / "below"
        assert (state / "hit").exists() and (below / "three").exists()
        calls = [call.name for call in preload.calls(state / "log") if call.name != "fsync"]
        assert calls == [*["open", "write", "close"] * 2, "rename"]
    for name, fault, file, content in (
        ("killed", Fault("signal", "SIGKILL", where="save", turn=2), "one", b"0123456789"),
        ("torn", Fault("error", "torn", where="save", turn=5), "two", b"01234"),
    ):
        assert written(library, tmp_path / name, fault)[1] == -9
        assert (tmp_path / name / "below" / file).read_bytes() == content
    now, back = (
        written(library, tmp_path / name, Fault("nothing", clock=clock))[2]
        for name, clock in (("now", ""), ("back", "0:-1000000"))
    )
    assert -1000010 < back - now < -999000


LOG = """1 0.1 mkdir 0 .
2 0.1 write 9 /metrics.jsonl
3 0.1 mkdir 0 /checkpoints
4 0.1 mkdir 0 /checkpoints/.tmp-step-00000004
5 0.2 rename 0 /checkpoints/step-00000004
6 0.3 write 9 /metrics.jsonl
7 0.4 write 9 /metrics.jsonl
8 0.4 mkdir 0 /checkpoints
9 0.4 fsync 0 .
10 0.4 mkdir 0 /checkpoints/.tmp-step-00000008
11 0.5 rename 0 /checkpoints/step-00000008
12 0.5 unlink 0 weights.safetensors
13 0.6 write 9 /metrics.jsonl
14 0.7 write 9 /.best.safetensors.0123456789ab.tmp
"""


def test_the_calls_of_a_save_are_told_from_the_others(tmp_path):
    (tmp_path / "log").write_text(LOG)
    calls = preload.calls(tmp_path / "log")
    found = preload.survey(calls, 1.0, 8, 0)
    assert (found.calls, found.save, found.elsewhere) == (14, [8, 9, 10, 11, 12], [1, 2, 6, 9, 14])
    assert attempts.stalls(calls) == pytest.approx([0.1, 0.1])  # 0.2 with a save between lines, 0.1 without


# What must hold


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


LAST = f"checkpoints/step-{STEPS:08}"
PLANTED = {
    "a step twice": (metrics(lambda lines: lines + lines[-2:]), "twice"),
    "no last step": (metrics(lambda lines: lines[:-2]), "steps"),
    "no last evaluation": (metrics(lambda lines: lines[:-1]), "evaluations"),
    "a line in two": (metrics(lambda lines: [lines[0][:9], "\n", *lines]), "torn"),
    "another loss": (metrics(lambda lines: [line.replace("1", "2") for line in lines]), "losses"),
    "torn weights": (lambda run: flip(run / "weights.safetensors"), "torn"),
    "a torn checkpoint": (lambda run: flip(run / LAST / "optimizer.safetensors"), "torn"),
    "no checkpoint": (lambda run: shutil.rmtree(run / LAST), "checkpoints"),
    "other weights": (lambda run: (run / "weights.safetensors").write_bytes(b""), "weights"),
    "a leaked file": (lambda run: (run / ".config.toml.0.tmp").touch(), "leaked"),
    "a leaked folder": (lambda run: (run / "checkpoints" / ".tmp-step-00000004").mkdir(), "leaked"),
    "a holder": (lambda run: (run / "running.json").write_text("{}"), "leaked"),
    "no result": (lambda run: (run / "weights.safetensors").unlink(), "missing"),
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
        (SERIAL, replace(ASKED, code=-15), "exit code"),
        (MPI, replace(ASKED, ranks=2, code=15), "exit code"),
        (SERIAL, replace(FAILED, code=70), "exit code"),
        (SERIAL, replace(ASKED, errors=""), "no word"),
        (SERIAL, replace(FAILED, errors="distgpt: internal error\nTraceback (most"), "traceback"),
        (SERIAL, replace(KILLED, hung=True), "hang"),
        (SERIAL, replace(KILLED, left=["python -m distgpt train"]), "left behind"),
        (SERIAL, Attempt(Fault("twice"), 1, code=2, second=2, errors="distgpt: in use\n"), "both refused"),
        (SERIAL, Attempt(Fault("twice"), 1, second=70), "exit code"),
    ):
        assert name in names_of(after_attempt(mode, done, Seen(), look(run))), done
    for mode, done in (
        (SERIAL, KILLED),
        (SERIAL, ASKED),
        (SERIAL, FAILED),
        (MPI, replace(KILLED, ranks=2, code=9)),
        (MPI, replace(ASKED, ranks=2, code=15, early=True)),
        (SERIAL, Attempt(Fault("twice"), 1, second=2)),
        (MPI, Attempt(Fault("signal", "SIGINT"), 2, code=-9, hung=True, early=True, errors="Traceback")),
    ):
        assert after_attempt(mode, done, Seen(), look(run)) == [], done
    (run / "running.json").write_text("{}")
    seen = look(run)
    assert names_of(after_attempt(SERIAL, ASKED, Seen(), seen)) == {"leaked"}
    assert after_attempt(SERIAL, ASKED, seen, seen) == []  # an earlier attempt left it


def test_lost_steps_and_older_checkpoints_are_noticed(run):
    before = look(run)
    shutil.rmtree(run / LAST)
    seen = look(run)
    assert (seen.step, seen.newest) == (STEPS, STEPS - EVERY)
    assert names_of(after_attempt(SERIAL, ASKED, Seen(), seen)) == {"lost"}
    assert after_attempt(SERIAL, KILLED, Seen(), seen) == []
    assert names_of(after_attempt(SERIAL, KILLED, before, seen)) == {"lost"}
    said = replace(ASKED, errors=f"distgpt: ended by SIGTERM; step {STEPS} is saved: resume with …\n")
    assert "untrue" in names_of(after_attempt(SERIAL, said, Seen(), seen))
    (run / "history.jsonl").write_text(json.dumps({"step": STEPS - EVERY}) + "\n")
    assert "older" in names_of(after_attempt(SERIAL, Attempt(Fault("nothing"), 1), before, look(run)))


def test_damage_is_done_to_one_file(run, whole):
    files = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file()]
    for how in faults.DAMAGES:
        name = trials.damage(run, Damage(how, 0.4, 0.5, 3)).partition(":")[0]
        intact = [(run / f).exists() and (run / f).read_bytes() == (whole / f).read_bytes() for f in files]
        assert [str(f) for f, same in zip(files, intact, strict=True) if not same] == [name], how
        shutil.rmtree(run)
        shutil.copytree(whole, run)


def row(number, wrong=(), lost=()):
    killed = {"came": True, "code": 9, "stalls": [0.01]}
    resumed = [{"came": False, "code": 0, "lost": seconds, "stalls": []} for seconds in lost]
    known = {"trial": number, "kind": "kill", "mode": "mpi", "seconds": 3.0}
    return known | {"wrong": [*wrong], "attempts": [killed, *resumed]}


def test_the_table_of_a_file_that_was_cut_off(tmp_path):
    head = {"seed": 1, "environment": {"commit": "abc", "processor": "a processor", "cores": 2}}
    rows = [row(n, lost=[1.0 + n]) for n in range(4)] + [row(4, wrong=["leaked: x", "leaked: y"])]
    text = "".join(json.dumps(each) + "\n" for each in (head, *rows))
    (tmp_path / "file").write_text(text + '{"trial": 5, "ki')
    found = table.tables(*table.read(tmp_path / "file"))
    assert "| kill | 5 | 5 | 0 | 1 | 2.50 | 4.00 |" in found and "| leaked | 2 | 4 |" in found
    assert "| mpi | 5 | 10.0 ms | 10.0 ms |" in found and "5 trials of seed 1" in found
    assert "Nothing was wrong" in table.tables(head, rows[:4])


@pytest.mark.slow
@pytest.mark.xdist_group("ranks")
@needs_compiler
def test_two_trials_and_one_more_resumed(tmp_path):
    out = tmp_path / "file.jsonl"
    words = [
        sys.executable,
        str(Path(trials.__file__).parents[1] / "torture.py"),
        "--out",
        str(out),
        "--kinds",
    ]
    words += ["kill in a save,error in a save,signal in a save"]
    words += ["--modes", "serial;mpi" if MPIRUN else "serial"]
    for more in (["--trials", "2"], ["--trials", "3", "--resume"]):
        done = subprocess.run([*words, *more], capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stderr
    _, rows = table.read(out)
    assert [row["trial"] for row in rows] == [0, 1, 2] and not any(row["wrong"] for row in rows)
    assert "Nothing was wrong" in done.stdout and sum(len(row["attempts"]) for row in rows) > 3
