"""Sweeps of miniature models: what they find, leave, resume and share among ranks."""

import fcntl
import json
import os
import re
import signal

import pytest
from distgpt.measure.sweep import work
from distgpt.measure.sweep.grid import Ledger, read_back

from conftest import distgpt, inside, needs_mpi, refused

SMALL = """
preset = "tiny-adamw"
data = "story"
tokenizer = "word"
val_fraction = 0.1
n_layer = 2
n_head = 2
n_embd = 16
seq_len = 16
batch_size = 8
norm = "layernorm"
mlp = "gelu"
positions = "learned"
bias = true
warmup = 0
schedule = "wsd"
steps = 9
"""
HALVING = (
    SMALL
    + """
[sweep]
lr = [1e-3, 1e-2, 2e-2, 1e30]
seed = [1, 2]
rungs = 2
eta = 2
"""
)
NAMES = [f"lr={lr},seed={seed}" for lr in ("0.001", "0.01", "0.02", "1e+30") for seed in (1, 2)]


def written(folder, text):
    folder.mkdir(exist_ok=True)
    (folder / "grid.toml").write_text(text)
    return folder


def sweep(folder, *args, **how):
    result = how.pop("run", inside)("sweep", "grid.toml", "--out", "out", "--threads", "1", *args, cwd=folder, **how)
    assert "Traceback" not in result.stderr, result.stderr
    return result


def results(folder):
    files = sorted((folder / "out" / "results").glob("*/result.json"))
    return {file.parent.name: json.loads(file.read_text()) for file in files}


def losses(folder):
    """The validation losses of every run, by step."""
    return {
        name: {rung["step"]: rung["val_loss"] for rung in found["rungs"]} for name, found in results(folder).items()
    }


def runs_in(done):
    """How many lines tell of a run that has ended; while one takes long, others tell how far it is."""
    return len(re.findall(r"seed=\d: (?!step)", done.stderr))


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = written(tmp_path_factory.mktemp("swept"), HALVING)
    done = sweep(folder)
    assert done.returncode == 0, done.stderr
    return folder, done


def test_the_worse_half_ends_early_and_a_run_that_diverges_is_a_row(swept):
    folder, done = swept
    found = losses(folder)
    assert sorted(found) == sorted(NAMES)
    means = {lr: [sum(found[f"lr={lr},seed={s}"][4] for s in (1, 2)) / 2] for lr in ("0.001", "0.01", "0.02")}
    worst = max(means, key=means.get)
    for name, of_run in found.items():
        lr = name.partition(",")[0].removeprefix("lr=")
        stop = json.loads((folder / "out" / name / "summary.json").read_text())["stop"]
        assert stop == ("not finite" if lr == "1e+30" else "ended early" if lr == worst else "finished")
        assert list(of_run) == ([] if lr == "1e+30" else [4] if lr == worst else [4, 9]), name
    assert {found["stop"] for found in results(folder).values()} == {"", "not finite"}
    rows = [line.split() for line in done.stdout.splitlines()[2:6]]
    assert [row[-1] for row in rows] == ["best", "finished", "early", "finite"]
    assert float(rows[0][2]) <= float(rows[1][2]) and rows[0][1] == "9" and rows[2][1] == "4"
    assert "the loss is not finite" in done.stdout or "the gradient is not finite" in done.stdout
    assert runs_in(done) == 12  # on all rungs
    out = folder / "out"
    points = json.loads((out / "sweep.json").read_text())["points"]
    first = points[0]["rungs"][-1]
    assert points[0]["state"] == "best" and f"{first['mean']:.4f} ± {first['spread']:.4f}" in done.stdout
    assert points[-1]["rungs"] == [] and points[-1]["state"] == "not finite"
    for name in NAMES:  # of what is finished no checkpoint is kept
        assert len([*(out / name / "checkpoints").glob("*")]) == (len(found[name]) == 1), name


def test_a_run_that_was_stopped_at_a_rung_is_the_run_of_the_whole_schedule(swept, tmp_path):
    """By the best configuration, which `distgpt train` takes."""
    folder, first = swept
    best = folder / "out" / "best.toml"
    done = inside("train", "--config", best, "--seed", "2", "--threads", "1", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    chosen = next(line for line in best.read_text().splitlines() if line.startswith("lr = "))
    own = folder / "out" / f"lr={float(chosen.split()[-1]):g},seed=2" / "weights.safetensors"
    assert own.read_bytes()[-4096:] == (tmp_path / "run" / "weights.safetensors").read_bytes()[-4096:]
    before = own.stat().st_mtime_ns
    again = sweep(folder)  # trains nothing, and prints the same
    assert (again.returncode, again.stdout, own.stat().st_mtime_ns) == (0, first.stdout, before)


@pytest.mark.slow
def test_a_sweep_that_is_interrupted_resumes_and_ends_as_if_not(swept, tmp_path, monkeypatch):
    folder, done = written(tmp_path, HALVING), swept[1]
    steps = []

    def stepped(self, metrics):
        steps.append(metrics["step"])
        if len(steps) in (6, 30):  # in the second run; on the second rung
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(work.Listener, "stepped", stepped)
    for _ in range(2):
        stopped = sweep(folder)
        assert stopped.returncode == 130 and "repeat the command" in stopped.stderr
    last = sweep(folder)
    assert last.returncode == 0, last.stderr
    assert losses(folder) == losses(swept[0])
    assert last.stdout.partition("\n\n")[0].split("tokens/s")[0] == done.stdout.split("tokens/s")[0]
    assert len(steps) == len(set(enumerate(steps))) == 6 * 4 + 4 * 5 + 2 * 1  # no step was taken twice


@pytest.mark.ci
def test_a_sweep_ends_before_its_time_limit(tmp_path):
    folder = written(tmp_path, SMALL.replace("steps = 9", "steps = 1000000") + "[sweep]\nlr = [1e-3]")
    stopped = sweep(folder, "--time-limit", "4s")
    assert stopped.returncode == 75 and "time limit reached; to resume the sweep" in stopped.stderr
    assert list((folder / "out" / "lr=0.001" / "checkpoints").iterdir())


def test_runs_that_are_added_are_trained_alone(swept, tmp_path):
    folder = written(tmp_path, SMALL + "[sweep]\nlr = [1e-3]")
    assert sweep(folder).returncode == 0
    written(tmp_path, SMALL + "[sweep]\nlr = [1e-2, 1e-3]")
    more = sweep(folder)
    assert more.returncode == 0 and "lr=0.01: val_loss" in more.stderr and "lr=0.001:" not in more.stderr
    written(tmp_path, SMALL + "[sweep]\nlr = [1e-2]")
    refused(sweep(folder), 2, "lr=0.001 changed")


def test_what_fails_for_another_reason_is_tried_again(tmp_path):
    folder = written(tmp_path, SMALL + "[sweep]\nval_tokens = [0]")
    assert sweep(folder).returncode == 0
    written(folder, SMALL + "[sweep]\nval_tokens = [0, 64]")
    foreign = folder / "out" / "val_tokens=64" / "file"
    foreign.parent.mkdir()
    foreign.touch()
    failed = sweep(folder)
    assert failed.returncode == 0 and "is not empty and not a run directory" in failed.stdout
    assert [line.split()[-1] for line in failed.stdout.splitlines()[2:4]] == ["best", "failed"]
    foreign.unlink()
    again = sweep(folder)
    assert again.returncode == 0 and "2 of 2: val_tokens=64: val_loss" in again.stderr
    file = folder / "out" / "results" / "val_tokens=64" / "result.json"
    file.write_text("{}x")
    refused(sweep(folder), 65, "result.json")


def test_a_preview_writes_nothing(tmp_path):
    found = sweep(written(tmp_path, HALVING), "--dry-run")
    assert found.returncode == 0, found.stderr
    for words in (*NAMES, "8 runs", "rung 1: 4 points of 2 seeds to step 4,"):
        assert found.stdout.count(words) == 1, words
    assert not (tmp_path / "out").exists()


def test_a_run_that_another_process_has_locked_is_left_to_it(swept):
    ledger = Ledger(swept[0] / "out", read_back(swept[0] / "out"))
    run = ledger.runs[0]
    lock = ledger.path / "results" / run.name / "running.json"
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with ledger.taken(run) as is_mine:
            assert not is_mine
    with ledger.taken(run) as is_mine:
        assert is_mine and lock.exists()
    assert not lock.exists()


def test_runs_with_different_tokenizers_are_compared_in_bits_per_byte(tmp_path):
    text = SMALL.replace('tokenizer = "word"', "") + '[sweep]\ntokenizer = ["word", "byte"]\n'
    refused(sweep(written(tmp_path, text)), 2, "the tokenizer", 'metric = "bits_per_byte"')
    assert not (tmp_path / "out").exists()
    done = sweep(written(tmp_path, text + 'metric = "bits_per_byte"'))
    assert done.returncode == 0, done.stderr
    best, other = (line.split() for line in done.stdout.splitlines()[2:4])
    assert float(best[2]) < float(other[2])


def test_grids_of_which_no_run_can_finish(tmp_path):
    for text, code, words in (
        (SMALL.replace("val_fraction = 0.1", "") + "[sweep]\nlr = [0.1]", 2, "no validation data"),
        (SMALL + "[sweep]\nn_kv_head = [1, 3]", 2, "n_kv_head=3: n_head (2) must be a multiple"),
        (SMALL + "train_minutes = 1\n[sweep]\nlr = [0.1]\nrungs = 2", 2, "train_minutes"),
        (SMALL.replace('"story"', '"stoory"') + "[sweep]\nlr = [0.1]", 65, "stoory"),
    ):
        refused(sweep(written(tmp_path, text)), code, words)
    assert not (tmp_path / "out").exists()
    refused(sweep(written(tmp_path, HALVING), "--stage", "mpi"), 2, "--stage")
    done = sweep(written(tmp_path, SMALL + "[sweep]\nlr = [1e30, 1e33]"))
    assert done.returncode == 76 and "has finished" in done.stderr


@pytest.mark.ranks
@pytest.mark.slow
@needs_mpi
def test_ranks_share_the_runs_and_find_the_same(swept, tmp_path):
    folder = written(tmp_path, HALVING)
    done = sweep(folder, run=distgpt, ranks=2)
    assert done.returncode == 0, done.stderr
    assert losses(folder) == losses(swept[0])
    assert (folder / "out" / "best.toml").read_text() == (swept[0] / "out" / "best.toml").read_text()
    assert runs_in(done) == 12, "a run was trained twice"
