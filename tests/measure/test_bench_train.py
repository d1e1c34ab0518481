"""`distgpt bench train` measures real runs in child processes; `distgpt bench infer`."""

import json
from functools import partial

import click
import pytest
from benching import RANKS, SMALL, STAGE, peak_here
from click.testing import CliRunner
from distgpt.cluster.jobs.processes import Ended
from distgpt.commands.bench import train as command_line
from distgpt.commands.options import set_by_user, settings, stage_options
from distgpt.core.base.errors import DataError, DistgptError, NonFiniteError, UsageError
from distgpt.core.config import GpuConfig
from distgpt.core.config.presets import preset
from distgpt.core.model.counts import operations
from distgpt.core.model.model import Architecture
from distgpt.measure import jobs
from distgpt.measure.bench import infer, train
from distgpt.measure.bench.infer import InferOptions
from distgpt.measure.bench.train import TrainOptions


def bench(*words):
    return CliRunner().invoke(command_line, list(map(str, words)))


@pytest.mark.ci
@pytest.mark.ranks
def test_bench_reports_speed_memory_and_peak_share(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "peak_gflops", partial(train.peak_gflops, seconds=0.05))
    monkeypatch.setattr(jobs, "ask", peak_here)
    done = bench(*SMALL, "--threads", 1, "--stage", STAGE, "--name", "found", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "train-found.json").read_text())
    (row,) = found["rows"]
    assert found["kind"] == "train" and f"{found['peak_gflops']:,.0f} GFLOP/s" in done.stdout
    assert row["steps"] == 6 and row["threads"] == 1 and row["ranks"] == len(row["peak_memory"]) == RANKS
    changes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "seq_len": 16, "bias": False, "vocab_size": 256}
    counted = operations(Architecture(preset("tiny", changes).model))
    assert found["operations_per_token"] == counted.forward + counted.backward
    assert row["mfu"] * found["peak_gflops"] * 1e9 == pytest.approx(row["tokens_per_s"] * found["operations_per_token"])
    assert 0 < row["mfu"] < 1 and row["peak_memory"][0] > 1e6 and row["first_loss"] > 5


def test_bench_passes_stage_options_to_children():
    command = click.command()(stage_options(settings(lambda **given: given)))
    every = GpuConfig(graphs=False, allreduce="host", deterministic=True, tf32=True)
    for stage, threads, gpu in (("serial", 3, GpuConfig()), ("mpi-cuda", None, every)):
        words = list(map(str, TrainOptions(stage, threads, gpu).stage_words()))
        at = words.index("--dtype")
        assert words[at + 1] == "float32"
        given = command.main(words[:at] + words[at + 2 :], standalone_mode=False)
        assert (given["stage"], given["threads"], given["gpu"]) == (stage, threads, gpu)
        assert not set_by_user({key: given[key] for key in given.keys() - {"stage", "threads", "gpu"}})


def test_bench_passes_settings_to_the_run(tmp_path, monkeypatch):
    seen = []

    def stop(what, config, out, words, launcher, ranks):
        seen.append((config, words))
        raise DistgptError("enough")

    monkeypatch.setattr(jobs, "train", stop)
    words = "--no-bias --untied --set shift_windows=true --set verify_data=false --lr 0.5 --threads 1"
    assert str(bench(*words.split(), "--dtype", "float64", "--out", tmp_path).exception) == "enough"
    ((config, words),) = seen
    changes = {"bias": False, "tied": False, "shift_windows": True, "verify_data": False, "lr": 0.5}
    assert config == preset("tiny", {**changes, "dtype": "float64", "steps": 20, "warmup": 4})
    assert words == ["--stage", "serial", "--dtype", "float64", "--threads", 1]


INTERNAL = "distgpt: internal error\nTraceback\nKeyError: 'x'\n"
KILLED = "= EXIT CODE: 9\nYOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\nThis is\n"


@pytest.mark.parametrize("code, errors, output, kind, words", [
    (65, "distgpt: no file\n", "", DataError, "no file"),
    (76, "distgpt: the loss is nan\nAbort(76)\n", "", NonFiniteError, "the loss is nan"),
    (-9, "", "", DistgptError, "the run failed (killed by SIGKILL)"),
    (9, "", KILLED, DistgptError, "the run failed (exit code 9): a rank ended: Killed (signal 9)"),
    (2, "usage: x\n", "", DistgptError, "the run failed (exit code 2): usage: x"),
    (70, INTERNAL, "", DistgptError, "the run failed (exit code 70): KeyError: 'x'"),
])  # fmt: skip
def test_failed_child_reports_its_error(code, errors, output, kind, words):
    with pytest.raises(DistgptError) as caught:
        jobs.raise_failure(Ended(code, output, errors, 1.0), "the run")
    assert (type(caught.value), str(caught.value)) == (kind, words)


def test_child_results_are_parsed(tmp_path):
    assert jobs.answer(Ended(0, 'warming up\n{"a": 1}\n{"a": 2}\nbye\n', "", 1.0), "it") == {"a": 2}
    with pytest.raises(DataError, match="it printed no result: sorry"):
        jobs.answer(Ended(0, "none\n", "sorry\n", 1.0), "it")
    lines = '{"step": 1, "loss": 2.0}\n{"step": 1, "val_loss": 1}\n{"step": 2, "loss": null}\n{"lo'
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert jobs.read_losses(tmp_path) == [2.0, None] and jobs.read_losses(tmp_path / "none") == []
    with pytest.raises(DataError, match=r"summary\.json"):
        jobs.read_summary(tmp_path)


@pytest.mark.ci
def test_infer_bench_has_a_row_per_case(tmp_path, capsys):
    how = {"preset": "tiny", "threads": 1, "dtypes": ("int8",), "requests": (1, 2)}
    infer.bench(InferOptions(**how, prompt=5, new=4, out=tmp_path))
    rows = json.loads((tmp_path / "infer-tiny.json").read_text())["rows"]
    assert [(row["requests"], row["dtype"]) for row in rows] == [(1, "int8"), (2, "int8")]
    for row in rows:
        assert 0 < row["first"] < row["whole_s"]
        assert row["prefill"] == pytest.approx(row["requests"] * 5 / row["first"])
        assert row["decode"] == pytest.approx(row["requests"] * 3 / (row["whole_s"] - row["first"]))
    assert "decode, tokens/s" in capsys.readouterr().out
    with pytest.raises(UsageError, match="the context of 128"):
        infer.bench(InferOptions(preset="tiny", prompt=100, new=64, out=tmp_path))
