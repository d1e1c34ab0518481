import json
import shutil
import struct
import sys
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from complaints import done
from distgpt.core.base.errors import DataError, StorageError, UsageError
from distgpt.show.display import TAGS, TensorBoard
from distgpt.show.plot import Curve, draw, plot, read_runs, short_names
from distgpt.show.runs import list_runs

from conftest import inside, metrics


def line(step, **more):
    loss = 3 + 5 / step
    usual = {"loss": loss, "lr": 1e-3 / step, "grad_norm": loss / 9, "tokens": 32 * step}
    return {"step": step, **usual, "tokens_per_s": 320.0, "step_s": 0.1, **more}


def run(folder, *lines, tail=""):
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines) + tail)
    return folder


def size(picture):
    data = Path(picture).read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", data[16:24])


def curve(folder, key):
    found = read_runs([folder])[0][key]
    return dict(zip(found.steps.tolist(), found.values.tolist(), strict=True))


def test_plot_draws_a_real_run(trained, tmp_path):
    trained = shutil.copytree(trained, tmp_path / "run")
    assert done("plot", trained).strip() == str(trained / "curves.png") and size(trained / "curves.png")[0] == 1800
    assert curve(trained, "loss") == {step: line["loss"] for step, line in metrics(trained).items()}


def test_picture_of_two_runs_names_differences(tmp_path):
    paths = [run(tmp_path / name / "gpt2", line(1), line(2, val_loss=3.0)) for name in ("slow", "fast")]
    title = "Two $runs$ 日本語 \udcff"  # letters without a glyph cause no warnings
    drawn = inside("plot", *paths, "--out", "both.svg", "--title", title, "--x", "tokens", cwd=tmp_path)
    assert (drawn.returncode, drawn.stderr) == (0, "")
    text = (tmp_path / drawn.stdout.strip()).read_text()
    for word in ("slow/gpt2", "fast/gpt2", "Two $runs$", "validation", "Gradient norm", "tokens/s"):
        assert word in text, word


UNKNOWN = dict.fromkeys(("loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_s"))
ODD = {
    "one step": [line(1)],
    "no numbers": [line(1, loss=None, grad_norm=0.0, tokens_per_s=None, lr=0.0)],
    "evaluations": [{"step": 0, "val_loss": 5.5}, line(1), {"step": 1, "hellaswag": 0.26}],
    "evaluation alone": [{"step": 0, "val_loss": 5.5}],
    "holes": [line(1), line(2, **UNKNOWN), line(3, step_s=None, tokens=None), line(4)],
    "nothing known": [line(1, **UNKNOWN)],
    "too large": [line(1), line(2, loss=2**63, lr=1e308, grad_norm=1e308, tokens_per_s=5e-324)],
}
LOOKS = [{}, {"log_loss": True}, {"axis": "time"}, {"axis": "tokens", "smooth": 2}]


@pytest.mark.ci
@pytest.mark.filterwarnings("error")
def test_odd_runs_are_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr("distgpt.show.plot.DPI", 40)
    for (what, lines), look in zip(ODD.items(), cycle(LOOKS), strict=False):
        folder = run(tmp_path / what, *lines, tail='{"step": 2, "lo')
        assert size(plot([folder], None, **look))[0] == 360, what


def test_missing_times_and_tokens_are_interpolated(tmp_path):
    holes = [line(1, step_s=0.5), line(2, step_s=None, tokens=None), line(3, step_s=1.0)]
    found = read_runs([run(tmp_path / "holes", *holes)])[0]
    assert (60 * found.places("time", np.array([1, 3]))).tolist() == [0.5, 2.5]
    assert found.places("tokens", np.array([1, 2, 3])).tolist() == [32, 64, 96]
    few = [line(10, step_s=0.5), line(20, step_s=1.0), {"step": 25, "val_loss": 1.0}, line(30, step_s=2.0)]
    found = read_runs([run(tmp_path / "few", *few)])[0]
    steps = np.array([10, 20, 25, 30])
    assert (60 * found.places("time", steps)).tolist() == pytest.approx([5.0, 15.0, 25.0, 35.0])
    assert found.places("tokens", steps).tolist() == [320, 640, 800, 960]


def test_outliers_do_not_set_the_speed_axis(tmp_path):
    lines = [line(step, tokens_per_s=1000.0) for step in range(3, 100)]
    folder = run(tmp_path / "run", line(1, tokens_per_s=1.0), line(2, tokens_per_s=1e6), *lines)
    speed = draw(read_runs([folder])).axes[-1]
    assert speed.get_title().startswith("Speed") and speed.get_ylim() == (0, 1200)
    assert set(speed.lines[-1].get_ydata()[2:]) == {1000.0}


def test_steep_start_is_cut(tmp_path):
    evaluated = [{"step": step, "val_loss": 9.0 if step == 0 else 3.5} for step in (0, 50, 100)]
    loss = draw(read_runs([run(tmp_path / "steep", *evaluated, *map(line, range(1, 101)))])).axes[0]
    assert loss.get_ylim() == pytest.approx((3.05 - 0.45 / 20, 3.5 + 0.45 / 20), abs=0.01)
    assert loss.get_title() == "Loss (nats per token), without the steep start"
    dotted = [drawn.get_xdata().tolist() for drawn in loss.lines if drawn.get_linestyle() == ":"]
    assert dotted == [[50, 100]]
    flat = [line(step, loss=3 - step / 100) for step in range(1, 101)]
    loss = draw(read_runs([run(tmp_path / "flat", *flat)])).axes[0]
    assert loss.get_ylim()[1] > 2.99 and loss.get_title() == "Loss (nats per token)"


@pytest.mark.parametrize(("name", "out", "error", "named"), [
    ("missing", None, UsageError, "no run directory .*; to list the runs: .*distgpt runs "),
    ("rum", None, UsageError, "no run directory .*; did you mean '.*run'"),
    ("other", None, UsageError, "not a run directory and contains no runs; .*distgpt train"),
    ("empty", None, UsageError, "no recorded steps"), ("half", None, UsageError, "no recorded steps"),
    ("run", "a.jpg", UsageError, "a.jpg"), ("run", "no/a.png", StorageError, "no/a.png"),
])  # fmt: skip
def test_invalid_runs_and_outputs_are_named(name, out, error, named, tmp_path):
    (tmp_path / "other").mkdir()
    run(tmp_path / "empty")
    run(tmp_path / "half", tail='{"step": 1')
    run(tmp_path / "run", line(1))
    before = {*tmp_path.rglob("*")}
    with pytest.raises(error, match=named) as refusal:
        plot([tmp_path / name], out and tmp_path / out)
    assert str(tmp_path / (out or name)) in str(refusal.value) and {*tmp_path.rglob("*")} == before


def test_resumed_run_hides_overwritten_steps(tmp_path):
    before = [line(step, loss=1.0) for step in range(1, 9)]
    lines = [*before, {"step": 8, "val_loss": 1.5}, line(5, loss=2.0), line(6, loss=2.0)]
    folder = run(tmp_path / "run", *lines, {"step": 6, "val_loss": 2.5})
    assert curve(folder, "loss") == dict.fromkeys(range(1, 5), 1.0) | {5: 2.0, 6: 2.0}
    assert curve(folder, "val_loss") == {6: 2.5}


def test_runs_are_ranked_by_validation_loss(tmp_path):
    scored = {"a": [3.0, 2.5, 2.7], "b": [], "c": [2.0]}
    paths = [
        run(tmp_path / name, line(1), *({"step": step, "val_loss": loss} for step, loss in enumerate(losses, 2)))
        for name, losses in scored.items()
    ]
    [legend] = draw(read_runs(paths)).legends
    assert [text.get_text()[0] for text in legend.get_texts()] == ["c", "a", "b", "v"]
    assert [text.get_text()[-9:] for text in legend.get_texts()[:2]] == ["val 2.000", "val 2.500"]


def test_mixed_tokenizers_are_compared_in_bits_per_byte(tmp_path):
    bits = {"loss": 1.5, "train_bits_per_byte": 1.0}, {"loss": 2.0, "train_bits_per_byte": 0.75}
    paths = [run(tmp_path / str(number), line(1, **each)) for number, each in enumerate(bits)]

    def losses(*paths):
        axes = draw(read_runs(paths)).axes[0]
        return axes.get_title(), [drawn.get_ydata()[-1] for drawn in axes.lines[:2]]

    assert losses(*paths[:2]) == ("Loss (nats per token)", [1.5, 2.0])
    for number, path in enumerate(paths):
        (path / "tokenizer.json").write_text(str(number % 2))
    title, drawn = losses(*paths[:2])
    assert title == "Loss (bits per byte)" and drawn == [1.0, 0.75]


def test_legend_shows_last_loss_and_best_validation(tmp_path):
    lines = [line(step, loss=4.0 - step / 50, train_bits_per_byte=8.0 - step / 25) for step in range(1, 101)]
    scored = {0: 1.2, 25: 2.5, 50: 1.5, 100: 2.25}
    measured = [
        {"step": step, "val_loss": loss, "bits_per_byte": 2 * loss, "val_tokens": 40, "held_out_tokens": 90}
        for step, loss in scored.items()
    ]
    of_other_text = {"step": 10, "val_loss": 0.5, "val_tokens": 9}
    folder = run(tmp_path / "run", measured[0], of_other_text, *lines, *measured[1:])
    [legend] = draw(read_runs([folder])).legends
    assert legend.get_texts()[0].get_text() == "run  2.000  val 1.500"
    for name in ("config.toml", "tokenizer.json"):
        (folder / name).write_text("")
    [found] = list_runs(folder, "name", reverse=False)
    assert (found.val_loss, found.bits_per_byte, found.val_step) == (1.5, 3.0, 50)
    assert (found.loss, found.train_bits_per_byte) == (2.0, 4.0)


def test_directory_plots_all_started_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("distgpt.show.plot.DPI", 40)
    monkeypatch.chdir(tmp_path)
    for name in ("a", "deeper/b", "c"):
        run(tmp_path / "runs" / name, line(1), line(2))
        for file in ("config.toml", "tokenizer.json"):
            (tmp_path / "runs" / name / file).touch()
    (tmp_path / "runs" / "c" / "metrics.jsonl").unlink()
    drawn = []
    monkeypatch.setattr("distgpt.show.plot.draw", lambda runs, **look: drawn.extend(runs) or draw(runs, **look))
    assert plot([tmp_path / "runs"], None) == Path("curves.png") and [of.name for of in drawn] == ["a", "b"]
    assert plot([tmp_path / "runs" / "a"], None) == tmp_path / "runs" / "a" / "curves.png"


def test_smoothing_keeps_lines_and_skips_nan():
    steps = np.arange(20)
    straight = Curve(steps, 3.0 * steps)
    assert np.allclose(straight.smoothed(5)[:18], straight.values[:18])
    assert np.array_equal(straight.smoothed(1), straight.values)
    assert np.allclose(Curve(steps, np.where(steps == 7, 5.0, 0.0)).smoothed(5)[4:11], [0, 1, 1, 1, 1, 1, 0])
    holes = Curve(steps, np.where(steps == 7, np.nan, 2.0))
    assert np.allclose(holes.smoothed(5), 2.0) and np.isnan(holes.smoothed(1)[7])
    assert np.allclose(Curve(steps, np.where(steps == 7, 1e9, 2.0)).smoothed(5, np.median), 2.0)


def test_names_are_short_and_runs_unique(tmp_path):
    for paths, names in (("/a/b/c", "c"), ("/a/b /a/c", "b c"), ("/a/x/run /a/y/run /a/y/old", "x/run y/run y/old")):
        assert short_names(list(map(Path, paths.split()))) == names.split()
    folder = run(tmp_path / "run", line(1))
    assert len(read_runs([folder, folder / ".." / "run"])) == 1


@pytest.mark.parametrize("line", [
    '{"step": true, "loss": 1.0}', '{"step": 1.5, "loss": 1.0}', '{"step": "1", "loss": 1.0}', '{"step": -1}',
    '{"step": 1, "loss": "2.0"}', '{"step": 1, "loss": true}', '{"step": 1, "loss": NaN}', '{"step": 1e400}',
    '{"step": 1, "step": 2}', "[]", "1", '{"step": null}', '{"loss": 1.0}', "[" * 5000 + "]" * 5000,
])  # fmt: skip
def test_invalid_metrics_are_rejected(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 3.0}\n' + line + "\n")
    with pytest.raises(DataError, match="line 2"):
        read_runs([tmp_path])


pytest.importorskip("tensorboardX")


def events(folder):
    """Yield all events, file by file in the order of names."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted((folder / "tensorboard").glob("events.out.tfevents.*")):
        data = path.read_bytes()
        while data:  # a length, its checksum, the content, its checksum
            (length,) = struct.unpack("<Q", data[:8])
            event = Event()
            event.ParseFromString(data[12 : 12 + length])
            yield event
            data = data[16 + length :]


def shown(folder):
    """Return (tag, step, value) as TensorBoard shows them: a new start hides later steps."""
    from tensorboardX.proto.event_pb2 import SessionLog

    kept = []
    for event in events(folder):
        if event.HasField("session_log") and event.session_log.status == SessionLog.START:
            kept = [point for point in kept if point[1] < event.step]
        kept += [(value.tag, event.step, value) for value in event.summary.value]
    return kept


def scalars(folder, tag):
    points = [(step, value.simple_value) for name, step, value in shown(folder) if name == tag]
    assert len({step for step, _ in points}) == len(points), f"{tag} has a step twice"
    return dict(points)


def reported(folder, first, last, loss=2.0, sample=None):
    board = TensorBoard()
    board.started({"directory": str(folder), "first_step": first - 1, "steps": 100})
    for step in range(first, last + 1):
        usual = {"lr": 0.5, "grad_norm": 0.25, "tokens": step, "tokens_per_s": 8.0, "step_s": 1.0}
        board.stepped({"step": step, "loss": loss, "train_bits_per_byte": 1.25, **usual})
        if step % 4 == 0:
            val = {"val_loss": loss + 1, "bits_per_byte": 1.5, "val_tokens": 9, "val_s": 0.1}
            board.evaluated({"step": step, **val})
            board.evaluated({"step": step, "hellaswag": 0.25, "hellaswag_examples": 8})
    if sample:
        board.sampled(last, sample)
    board.close()


def test_every_measure_has_a_curve(tmp_path):
    reported(tmp_path, 1, 8)
    assert scalars(tmp_path, "loss/train") == dict.fromkeys(range(1, 9), 2.0)
    assert scalars(tmp_path, "loss/validation") == {4: 3.0, 8: 3.0}
    assert scalars(tmp_path, "accuracy/hellaswag") == {4: 0.25, 8: 0.25}
    assert {tag for tag, _, _ in shown(tmp_path)} == set(TAGS.values())


def test_resumed_run_repeats_no_step(tmp_path):
    reported(tmp_path, 1, 8, loss=2.0)
    reported(tmp_path, 5, 6, loss=1.0)
    reported(tmp_path, 5, 12, loss=0.5)
    assert len(list((tmp_path / "tensorboard").iterdir())) == 3, "starts within a second share a file"
    assert scalars(tmp_path, "loss/train") == dict.fromkeys(range(1, 5), 2.0) | dict.fromkeys(range(5, 13), 0.5)
    assert scalars(tmp_path, "loss/validation") == {4: 3.0, 8: 1.5, 12: 1.5}


def test_samples_keep_line_breaks(tmp_path):
    reported(tmp_path, 1, 2, sample="one\n\n  <b>two</b> ü")
    texts = [(step, value) for tag, step, value in shown(tmp_path) if tag.startswith("sample")]
    assert [step for step, _ in texts] == [2]
    assert texts[0][1].tensor.string_val[0].decode() == "    one\n    \n      <b>two</b> ü"


def test_unwritable_directory_is_named(tmp_path):
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(StorageError, match="tensorboard"):
        TensorBoard().started({"directory": str(tmp_path), "first_step": 0})


def test_missing_tensorboard_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(UsageError, match=r"distgpt\[tensorboard\]"):
        TensorBoard()
