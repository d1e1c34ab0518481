"""Grid files: which runs they stand for, what is refused, and which points are promoted."""

import pytest
from distgpt.core.base.errors import UsageError
from distgpt.measure.sweep.grid import Grid, Result, Rung, begin, on_rung, read_back, read_grid


@pytest.fixture
def grid_of(tmp_path):
    """Read a grid from the text of a file."""

    def read(text):
        (tmp_path / "grid.toml").write_text(text)
        return read_grid(tmp_path / "grid.toml")

    return read


def test_lists_are_combined_and_every_point_has_all_seeds(grid_of):
    grid = grid_of('preset = "fast"\nsteps = 9\n[sweep]\nlr = [1, 0.02, 0.02]\ntied = [true, false]\nseed = [3, 4]')
    assert list(grid.points.values())[:2] == [{"lr": 1.0, "tied": True}, {"lr": 1.0, "tied": False}]
    runs = list(grid.runs())
    assert len(grid.points) == 4 and len({run.name for run in runs}) == len(runs) == 8
    assert runs[0].name == "lr=1,tied=True,seed=3" and runs[1].point == runs[0].point == "lr=1,tied=True"
    assert runs[1].values == {"keep": 1, "preset": "fast", "steps": 9, "lr": 1.0, "tied": True, "seed": 4}
    assert [run.name for run in grid_of("[sweep]\nseed = [1, 2]").runs()] == ["seed=1", "seed=2"]
    paths = ["a/b", "a_b", "../" + "x" * 300]  # names are fit for folders and tell values apart
    grid = grid_of(f"[sweep]\ndata = {paths}\nlr = [0.1234567, 0.1234568]")
    assert len(grid.points) == 6 and all("/" not in name and len(name) < 120 for name in grid.points)


DRAWN = """
[sweep]
draws = {}
lr = {{low = 0.1234567, high = 40, scale = "log"}}
n_layer = {{low = 1, high = 3}}
mlp = ["gelu", "relu"]
"""


def test_more_draws_begin_with_the_same_points(grid_of):
    few, many = (list(grid_of(DRAWN.format(draws)).points.values()) for draws in (40, 200))
    assert many[:40] == few and len({str(point) for point in many}) == 200
    assert all(0.1234567 <= point["lr"] <= 40 for point in many)
    assert {point["n_layer"] for point in many} == {1, 2, 3} and {point["mlp"] for point in many} == {"gelu", "relu"}
    assert 60 < sum(point["lr"] < 2.2 for point in many) < 140  # the middle by the logarithm
    other = grid_of(DRAWN.format("40\ndraw_seed = 1"))
    assert list(other.points.values()) != few
    assert len(grid_of("[sweep]\ndraws = 9\ntied = [true, false]").points) == 2  # all that there are


def test_what_makes_no_sense_is_refused(grid_of):
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
        ('[sweep]\nlr = [1]\nmetric = "los"', "did you mean 'loss'"),
        ("[sweep]\nlr = [1]\neta = 1", "eta must"),
        (f"[sweep]\nlr = {list(range(1, 200))}\nsteps = {list(range(1, 200))}", "more than 10,000 runs"),
    ):
        with pytest.raises(UsageError, match=words):
            grid_of(text)


def test_settings_of_the_command_line_count_for_all_runs_and_cannot_vary(tmp_path):
    path = tmp_path / "grid.toml"
    path.write_text("steps = 9\nn_layer = 2\n[sweep]\nlr = [0.1, 0.2]\n")
    assert read_grid(path, {"steps": 5, "rope_base": 500.0}).fixed == {"steps": 5, "n_layer": 2, "rope_base": 500.0}
    with pytest.raises(UsageError, match="lr is set twice"):
        read_grid(path, {"lr": 0.3})


def result(*values, stop=""):
    return Result([Rung(i + 1, val_loss=value) for i, value in enumerate(values)], stop)


def test_the_best_points_are_promoted_by_the_mean_of_their_seeds():
    grid = Grid({}, {name: {"data": name} for name in "abcde"}, [1, 2], rungs=3, eta=2.0)
    assert [grid.until(rung, 100) for rung in range(3)] == [25, 50, 100]
    first = {"a": (3, 3), "b": (1, 4), "c": (2, 2), "d": (0, None), "e": (2.4, 2.4)}
    runs = {run.name: run.point for run in grid.runs()}
    results = {}
    for name, point in runs.items():
        value = first[point][name.endswith("2")]
        results[name] = result(stop="not finite") if value is None else result(value)
    assert on_rung(grid, results, 0) == list("abcde")
    assert on_rung(grid, results, 1) == ["c", "e", "b"]  # three of five; of d a run has failed
    for name, point in runs.items():
        if point in "ceb":
            results[name] = result(1.0, {"c": 1.0, "e": 0.9, "b": 2.0}[point])
    assert on_rung(grid, results, 2) == ["e", "c"]


def test_runs_may_be_added_to_a_sweep_and_nothing_else_changed(tmp_path):
    def grid(**more):
        given = {"fixed": {"steps": 3}, "points": {"a": {"lr": 1.0}}, "seeds": [1]} | more
        return Grid(**given)

    begin(tmp_path / "out", grid())
    begin(tmp_path / "out", grid(points={"b": {"lr": 2.0}, "a": {"lr": 1.0}}, seeds=[1, 2]))
    assert list(read_back(tmp_path / "out").points) == ["b", "a"]
    for changed, words in (
        ({"fixed": {"steps": 4}}, r"another grid \(steps, "),
        ({"fixed": {"steps": 3, "lr": 1.0}}, r"\(lr, "),
        ({"rungs": 2}, r"\(rungs, "),
        ({"seeds": [2]}, r"lr=1,seed=1.* changed"),
    ):
        with pytest.raises(UsageError, match=words):
            begin(tmp_path / "out", grid(**changed))
    with pytest.raises(UsageError, match="has no sweep"):
        begin(tmp_path, grid())
