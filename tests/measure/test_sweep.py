"""`distgpt sweep`: grid files and promotion; sweeps of tiny models, resumed and shared among ranks."""

import fcntl
import json
import os
import re
import signal

import pytest
from distgpt.core.base.errors import UsageError
from distgpt.measure.sweep import work
from distgpt.measure.sweep.grid import Grid, Ledger, Result, Rung, on_rung, read_back, read_grid

from conftest import distgpt, inside, refused, slow_ranks, succeeded, summary


@pytest.fixture
def grid_of(tmp_path):
    def read(text):
        (tmp_path / "grid.toml").write_text(text)
        return read_grid(tmp_path / "grid.toml")

    return read


def test_grid_combines_lists_and_seeds(grid_of):
    grid = grid_of('preset = "fast"\nsteps = 9\n[sweep]\nlr = [1, 0.02, 0.02]\ntied = [true, false]\nseed = [3, 4]')
    assert list(grid.points.values())[:2] == [{"lr": 1.0, "tied": True}, {"lr": 1.0, "tied": False}]
    runs = list(grid.runs())
    assert len(grid.points) == 4 and len({run.name for run in runs}) == len(runs) == 8
    assert runs[0].name == "lr=1,tied=True,seed=3" and runs[1].point == runs[0].point == "lr=1,tied=True"
    assert runs[1].values == {"keep": 1, "preset": "fast", "steps": 9, "lr": 1.0, "tied": True, "seed": 4}
    assert [run.name for run in grid_of("[sweep]\nseed = [1, 2]").runs()] == ["seed=1", "seed=2"]
    paths = ["a/b", "a_b", "../" + "x" * 300]  # names are valid file names and unique
    grid = grid_of(f"[sweep]\ndata = {paths}\nlr = [0.1234567, 0.1234568]")
    assert len(grid.points) == 6 and all("/" not in name and len(name) < 120 for name in grid.points)


DRAWN = """
[sweep]
draws = {}
lr = {{low = 0.1234567, high = 40, scale = "log"}}
n_layer = {{low = 1, high = 3}}
mlp = ["gelu", "relu"]
"""


def test_more_draws_keep_earlier_points(grid_of):
    few, many = (list(grid_of(DRAWN.format(draws)).points.values()) for draws in (40, 200))
    assert many[:40] == few and len({str(point) for point in many}) == 200
    assert all(0.1234567 <= point["lr"] <= 40 for point in many)
    assert {point["n_layer"] for point in many} == {1, 2, 3} and {point["mlp"] for point in many} == {"gelu", "relu"}
    assert 60 < sum(point["lr"] < 2.2 for point in many) < 140  # the logarithmic middle
    assert list(grid_of(DRAWN.format("40\ndraw_seed = 1")).points.values()) != few
    assert len(grid_of("[sweep]\ndraws = 9\ntied = [true, false]").points) == 2  # every point


def test_invalid_grids_are_rejected(grid_of):
    for text, words in (
        ("steps = 3", "requires a table"),
        ("[sweep]\ndraws = 3", "no settings that vary"),
        ("[sweep]\nlr = 0.1", "a list of values or a range"),
        ("[sweep]\nlr = []", "a list of values"),
        ("[sweep]\nlr = [0.1, -1]", "lr must be above 0, not -1"),
        ("[sweep]\nlrr = [1]", "did you mean 'lr'"),
        ("stepps = 1\n[sweep]\nlr = [1]", "did you mean 'steps'"),
        ("[sweep]\nlr = {low = 1}", "a range must be"),
        ("[sweep]\nlr = {low = 1, high = 2}", "draws = N"),
        ("[sweep]\ndraws = 1\nlr = {low = 2, high = 1}", "must be less than high"),
        ('[sweep]\ndraws = 1\nmin_lr = {low = 0, high = 1, scale = "log"}', "above 0 for log"),
        ("[sweep]\ndraws = 1\ntied = {low = 0, high = 1}", "a range must be"),
        ("[sweep]\nseed = {low = 0, high = 1}", "seed must be a list"),
        ("lr = 1\n[sweep]\nlr = [1]", "set twice"),
        ("ensemble = 2\n[sweep]\nlr = [0.1]", "remove ensemble"),
        ('[sweep]\nlr = [1]\nmetric = "los"', "did you mean 'loss'"),
        ("[sweep]\nlr = [1]\neta = 1", "eta must"),
        (f"[sweep]\nlr = {list(range(1, 200))}\nsteps = {list(range(1, 200))}", "more than 10,000 runs"),
    ):
        with pytest.raises(UsageError, match=words):
            grid_of(text)


def test_command_line_settings_apply_to_all_runs(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text("steps = 9\nn_layer = 2\n[sweep]\nlr = [0.1, 0.2]\n")
    assert read_grid(path, {"steps": 5, "rope_base": 500.0}).fixed == {"steps": 5, "n_layer": 2, "rope_base": 500.0}
    with pytest.raises(UsageError, match="lr is set twice"):
        read_grid(path, {"lr": 0.3})


def result(*values, stop=""):
    return Result([Rung(i + 1, val_loss=value) for i, value in enumerate(values)], stop)


def test_best_points_are_promoted_by_seed_mean():
    grid = Grid({}, {name: {"data": name} for name in "abcde"}, [1, 2], rungs=3, eta=2.0)
    assert [grid.until(rung, 100) for rung in range(3)] == [25, 50, 100]
    first = {"a": (3, 3), "b": (1, 4), "c": (2, 2), "d": (0, None), "e": (2.4, 2.4)}
    runs = {run.name: run.point for run in grid.runs()}
    results = {}
    for name, point in runs.items():
        value = first[point][name.endswith("2")]
        results[name] = result(stop="not finite") if value is None else result(value)
    assert on_rung(grid, results, 0) == list("abcde")
    assert on_rung(grid, results, 1) == ["c", "e", "b"]  # three of five; a run of d failed
    for name, point in runs.items():
        if point in "ceb":
            results[name] = result(1.0, {"c": 1.0, "e": 0.9, "b": 2.0}[point])
    assert on_rung(grid, results, 2) == ["e", "c"]


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
HALVING = f"{SMALL}[sweep]\nlr = [1e-3, 1e-2, 2e-2, 1e30]\nseed = [1, 2]\nrungs = 2\neta = 2\n"
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
    found = results(folder)
    return {name: {rung["step"]: rung["val_loss"] for rung in found[name]["rungs"]} for name in found}


def runs_in(done):
    return len(re.findall(r"seed=\d: (?!step)", done.stderr))


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = written(tmp_path_factory.mktemp("swept"), HALVING)
    done = sweep(folder)
    assert done.returncode == 0, done.stderr
    return folder, done


def test_sweep_stops_worse_half_and_lists_divergence(swept):
    folder, done = swept
    found = losses(folder)
    assert sorted(found) == sorted(NAMES)
    means = {lr: [sum(found[f"lr={lr},seed={s}"][4] for s in (1, 2)) / 2] for lr in ("0.001", "0.01", "0.02")}
    worst = max(means, key=means.get)
    for name, of_run in found.items():
        lr = name.partition(",")[0].removeprefix("lr=")
        stop = summary(folder / "out" / name)["stop"]
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
    for name in NAMES:  # finished runs keep no checkpoint
        assert len([*(out / name / "checkpoints").glob("*")]) == (len(found[name]) == 1), name


def test_promoted_run_equals_uninterrupted_run(swept, tmp_path):
    folder, first = swept
    best = folder / "out" / "best.toml"
    succeeded("train", "--config", best, "--seed", "2", "--threads", "1", "--out", tmp_path / "run")
    chosen = next(line for line in best.read_text().splitlines() if line.startswith("lr = "))
    own = folder / "out" / f"lr={float(chosen.split()[-1]):g},seed=2" / "weights.safetensors"
    assert own.read_bytes()[-4096:] == (tmp_path / "run" / "weights.safetensors").read_bytes()[-4096:]
    before = own.stat().st_mtime_ns
    again = sweep(folder)  # trains nothing, and prints the same
    assert (again.returncode, again.stdout, own.stat().st_mtime_ns) == (0, first.stdout, before)


@pytest.mark.slow
def test_interrupted_sweep_resumes_with_equal_results(swept, tmp_path, monkeypatch):
    folder, done = written(tmp_path, HALVING), swept[1]
    steps = []

    def stepped(self, metrics):
        steps.append(metrics["step"])
        if len(steps) in (6, 30):  # during the second run; on the second rung
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
def test_sweep_ends_before_its_time_limit(tmp_path):
    folder = written(tmp_path, SMALL.replace("steps = 9", "steps = 1000000") + "[sweep]\nlr = [1e-3]")
    stopped = sweep(folder, "--time-limit", "4s")
    assert stopped.returncode == 75 and "time limit reached; to resume the sweep" in stopped.stderr
    assert list((folder / "out" / "lr=0.001" / "checkpoints").iterdir())


def test_sweep_trains_only_added_runs(swept, tmp_path):
    folder = written(tmp_path, SMALL + "[sweep]\nlr = [1e-3]")
    other = written(tmp_path / "out", "not a sweep") / "grid.toml"
    refused(sweep(folder), 2, "has no sweep")
    other.unlink()
    assert sweep(folder).returncode == 0
    written(tmp_path, SMALL + "[sweep]\nlr = [1e-2, 1e-3]")
    more = sweep(folder)
    assert more.returncode == 0 and "lr=0.01: val_loss" in more.stderr and "lr=0.001:" not in more.stderr
    written(tmp_path, SMALL + "[sweep]\nlr = [1e-2]")
    refused(sweep(folder), 2, "lr=0.001 changed")
    for old, new, named in (
        ("steps = 9", "steps = 8", "(steps changed"),
        ("[sweep]", "[sweep]\nrungs = 2", "(rungs ch"),
    ):
        written(tmp_path, (SMALL + "[sweep]\nlr = [1e-2, 1e-3]").replace(old, new))
        refused(sweep(folder), 2, "another grid", named)


def test_sweep_retries_failed_runs(tmp_path):
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


def test_sweep_dry_run_writes_nothing(tmp_path):
    found = sweep(written(tmp_path, HALVING), "--dry-run")
    assert found.returncode == 0, found.stderr
    for words in (*NAMES, "8 runs", "rung 1: 4 points of 2 seeds to step 4,"):
        assert found.stdout.count(words) == 1, words
    assert not (tmp_path / "out").exists()


def test_sweep_skips_locked_runs(swept):
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


def test_sweep_compares_tokenizers_in_bits_per_byte(tmp_path):
    text = SMALL.replace('tokenizer = "word"', "") + '[sweep]\ntokenizer = ["word", "byte"]\n'
    refused(sweep(written(tmp_path, text)), 2, "the tokenizer", 'metric = "bits_per_byte"')
    assert not (tmp_path / "out").exists()
    done = sweep(written(tmp_path, text + 'metric = "bits_per_byte"'))
    assert done.returncode == 0, done.stderr
    best, other = (line.split() for line in done.stdout.splitlines()[2:4])
    assert float(best[2]) < float(other[2])


def test_sweep_rejects_grids_without_valid_runs(tmp_path):
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


@slow_ranks
def test_ranks_share_sweep_runs(swept, tmp_path):
    folder = written(tmp_path, HALVING)
    done = sweep(folder, run=distgpt, ranks=2)
    assert done.returncode == 0, done.stderr
    assert losses(folder) == losses(swept[0])
    assert (folder / "out" / "best.toml").read_text() == (swept[0] / "out" / "best.toml").read_text()
    assert runs_in(done) == 12, "a run was trained twice"
