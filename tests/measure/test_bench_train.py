"""bench train: real runs as children, and what is made of what they leave."""

import importlib.util
import json
import sys
from functools import partial

import click
import pytest
from click.testing import CliRunner
from conftest import MPIRUN, distgpt

from distgpt.commands.bench import train as command_line
from distgpt.commands.options import stage_options
from distgpt.config import GpuConfig, RunConfig
from distgpt.config.presets import preset
from distgpt.errors import DataError, DistgptError, NonFiniteError, UsageError
from distgpt.machine.processes import Ended
from distgpt.measure import jobs
from distgpt.measure.bench import train
from distgpt.measure.bench.train import TrainOptions, _found, _train_peer, text
from distgpt.measure.peer import peer_modes
from distgpt.model.counts import operations
from distgpt.model.model import Architecture

SMALL = ("--n-layer", 1, "--n-embd", 16, "--n-head", 2, "--seq-len", 16, "--batch-size", 4, "--steps", 6)
STAGE, RANKS = ("mpi", 2) if MPIRUN and importlib.util.find_spec("mpi4py") else ("serial", 1)
MINE = {"stage": "serial", "ranks": 1, "threads": 1, "step_s_median": 0.1, "peak_memory": [5]}
MINE |= {"dtype": "float32", "first_loss": 5.0, "final_loss": 4.0}
PEER = {"step_s_median": 0.2, "first_loss": 5.1, "final_loss": 5.0, "threads": 1, "peak_rss_bytes": 9}
PEER |= {"torch": "0"}

# Answers as peer_torch.py does, and notes what it was told; compiled it is faster.
FAKE = """#!{python}
import json, sys
if sys.argv[1] == "-c":
    print("2.0")
else:
    open({heard!r}, "a").write(sys.argv[3] + "\\n")
    seconds = 0.1 if json.loads(sys.argv[3])["compile"] else 0.2
    print(json.dumps({peer!r} | {{"tokens_per_s": 10 / seconds, "step_s_min": seconds}}))
"""


def bench(*words):
    return CliRunner().invoke(command_line, list(map(str, words)))


def peak_here(what, words, launcher, ranks):
    """The peak's child, which would measure it for seconds, in this process and its one rank."""
    assert words[:3] == ["bench", "train", "--measure-peak"] and (launcher is not None) == (RANKS == 2)
    found = bench(*("serial" if word == "mpi" else word for word in words[2:]))
    return json.loads(found.stdout)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What a command with a peer left, what it printed, and what the peer was told."""
    out = tmp_path_factory.mktemp("bench")
    python, heard = out / "python", out / "heard"
    python.write_text(FAKE.format(python=sys.executable, heard=str(heard), peer=PEER))
    python.chmod(0o755)
    modes = ("--peer-mode", "eager", "--peer-mode", "best")
    peer = ("--peer", "torch", "--peer-python", python, "--rounds", 2, *modes)
    words = (*SMALL, "--threads", 1, "--stage", STAGE, "--name", "found", "--out", out, *peer)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "measure_peaks", partial(train.measure_peaks, seconds=0.05))
        patch.setattr(jobs, "ask", peak_here)
        done = bench(*words)
    assert done.exit_code == 0, done.output
    requests = [json.loads(line) for line in heard.read_text().splitlines()]
    return json.loads((out / "train-found.json").read_text()), done.stdout, requests


def test_a_run_reports_speed_memory_and_share_of_the_peak(measured):
    found, _, _ = measured
    row = found["rows"][0]
    assert found["kind"] == "train" and row["who"] == "distgpt"
    assert row["steps"] == 6 and row["threads"] == 1
    assert row["ranks"] == len(row["peak_memory"]) == RANKS
    changes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "seq_len": 16, "bias": False, "vocab_size": 256}
    counted = operations(Architecture(preset("tiny", changes).model))
    assert found["operations_per_token"] == counted.forward + counted.backward
    assert row["mfu"] * found["peak_gflops"] * 1e9 == pytest.approx(
        row["tokens_per_s"] * found["operations_per_token"]
    )
    assert 0 < row["mfu"] < 1 and row["peak_memory"][0] > 1e6 and row["first_loss"] > 5


def test_a_peer_is_told_our_model_and_gets_the_ratio_of_pairs(measured):
    found, printed, requests = measured
    eager, best = found["peers"]
    assert (eager["mode"], best["mode"], len(found["runs"])) == ("eager", "compile+keep-freed", 2)
    for peer, speed in ((eager, 50), (best, 100)):
        ratios = [run["ours"]["tokens_per_s"] / speed for run in found["runs"]]
        assert peer["ratios"] == pytest.approx(ratios) and peer["ratio"] == pytest.approx(sum(ratios) / 2)
    assert best["memory_ratio"] == pytest.approx(
        sum(sum(run["ours"]["peak_memory"]) / 9 for run in found["runs"]) / 2
    )
    shape = {"n_embd": 16, "bias": False, "norm_gain": True, "positions": "rope", "vocab_size": 256}
    recipe = {"threads": RANKS, "batch_size": 4, "lr": preset("tiny").train.lr, "dtype": "float32"}
    for request in requests:
        assert request["shape"].items() >= shape.items() and "init_residual" not in request["shape"]
        assert request.items() >= recipe.items() and request["steps"] == 4
    assert "× PyTorch (eager)" in printed and "compile+keep-freed, the fastest of 3 modes" in printed


def test_the_fastest_mode_is_found_once_and_rounds_take_turns(measured):
    _, _, requests = measured
    tried, trained = requests[:3], requests[3:]
    told = [{name for name in peer_modes.SWITCHES if request[name]} for request in tried]
    assert told == [{"keep_freed"}, {"compile", "keep_freed"}, {"autotune", "keep_freed"}]
    assert [(each["compile"], each["keep_freed"]) for each in trained] == [(False, False), (True, True)] * 2


def test_modes_are_switches_by_name():
    every = dict.fromkeys(peer_modes.SWITCHES, False)
    assert peer_modes.switches("eager") == every
    assert peer_modes.switches("keep-freed+onednn") == every | {"keep_freed": True, "onednn": True}
    narrow = peer_modes.candidates("bfloat16")
    assert all(peer_modes.switches(mode) for mode in narrow) and len(narrow) == len(set(narrow)) == 6


def test_the_middle_pair_counts():
    runs = [
        {"ours": MINE | {"tokens_per_s": a}, "peers": [PEER | {"tokens_per_s": b}]}
        for a, b in ((30, 10), (8, 4), (50, 10))
    ]
    modes = [{"asked": "best", "mode": "compile", "tried_step_s_min": {"compile": 1.0}}]
    found = _found(TrainOptions(), RunConfig(preset("microgpt").model), modes, runs, 2.0)
    (peer,) = found["peers"]
    assert peer["ratios"] == [3, 2, 5] and peer["ratio"] == 3 and peer["tokens_per_s"] == 10
    assert peer["memory_ratio"] == pytest.approx(5 / 9)
    assert [row["tokens_per_s"] for row in found["rows"]] == [30, 10]
    assert "3.00 × PyTorch (compile, the fastest of 1 modes) at 0.56 × its memory" in text(found)


def test_a_peer_has_as_many_threads_as_all_ranks_together_and_our_dtype(monkeypatch):
    monkeypatch.setattr(jobs, "ask_peer", lambda *words: words)
    options = TrainOptions(
        "mpi", 3, ranks=2, peer="torch", peer_python="python", settings={"dtype": "bfloat16"}
    )
    python, command, request = _train_peer(options, preset("gpt2"), {"mode": "autocast"})
    assert (python, command) == ("python", "train") and request["threads"] == options.all_threads == 6
    assert request["dtype"] == "bfloat16" and request["autocast"] and not request["compile"]


def test_stage_and_gpu_options_are_passed_on_to_every_child():
    command = click.command()(stage_options(lambda **given: given))
    every = GpuConfig(graphs=False, allreduce="host", deterministic=True, tf32=True)
    for stage, threads, gpu in (("serial", 3, GpuConfig()), ("mpi-cuda", None, every)):
        words = list(map(str, TrainOptions(stage, threads, gpu).stage_words()))
        at = words.index("--dtype")
        assert words[at + 1] == "float32"
        given = command.main(words[:at] + words[at + 2 :], standalone_mode=False)
        assert given == {"stage": stage, "threads": threads, "gpu": gpu}


def test_every_setting_reaches_the_run(tmp_path, monkeypatch):
    """Of a child that never starts: its configuration is in a file."""
    seen = []

    def stop(what, config, out, words, launcher, ranks):
        seen.append((config, words))
        raise DistgptError("enough")

    monkeypatch.setattr(jobs, "train", stop)
    words = ("--no-bias", "--untied", "--shift-windows", "--trust-data", "--lr", "0.5", "--threads", "1")
    result = bench(*words, "--dtype", "float64", "--out", tmp_path)
    assert str(result.exception) == "enough"
    ((config, words),) = seen
    changes = {"bias": False, "tied": False, "shift_windows": True, "verify_data": False, "lr": 0.5}
    assert config == preset("tiny", {**changes, "dtype": "float64", "steps": 20, "warmup": 4})
    assert words == ["--stage", "serial", "--dtype", "float64", "--threads", 1]


def test_a_failed_child_is_reported_in_its_own_words():
    def failure(code, errors="", output=""):
        with pytest.raises(DistgptError) as caught:
            jobs.raise_failure(Ended(code, output, errors, 1.0), "the run")
        return type(caught.value), str(caught.value)

    assert failure(65, "distgpt: no file\n") == (DataError, "no file")
    assert failure(76, "distgpt: the loss is nan\nAbort(76)\n") == (NonFiniteError, "the loss is nan")
    assert failure(-9) == (DistgptError, "the run failed (killed by SIGKILL)")
    told = "= EXIT CODE: 9\nYOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\nThis is\n"
    assert failure(9, output=told)[1] == "the run failed (exit code 9): a rank ended: Killed (signal 9)"
    assert failure(2, "usage: x\n") == (DistgptError, "the run failed (exit code 2): usage: x")
    crashed = "distgpt: internal error\nTraceback\nKeyError: 'x'\n"
    assert failure(70, crashed) == (DistgptError, "the run failed (exit code 70): KeyError: 'x'")


def test_a_result_is_the_last_object_that_a_child_prints():
    printed = 'warming up\n{"a": 1}\n{"a": 2}\nbye\n'
    assert jobs.answer(Ended(0, printed, "", 1.0), "it") == {"a": 2}
    with pytest.raises(DataError, match="it printed no result: sorry"):
        jobs.answer(Ended(0, "none\n", "sorry\n", 1.0), "it")


def test_losses_are_read_as_far_as_lines_are_whole(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"loss": 2.0}\n{"val_loss": 1}\n{"loss": null}\n{"lo')
    assert jobs.read_losses(tmp_path) == [2.0, None] and jobs.read_losses(tmp_path / "none") == []
    with pytest.raises(DataError, match=r"left no summary\.json"):
        jobs.read_summary(tmp_path)


def test_what_makes_no_sense_is_refused(tmp_path):
    nowhere = tmp_path / "nowhere"
    for words, said in (
        (("--peer", "torch", "--peer-python", nowhere), "cannot import torch"),
        (("--peer", "torch", "--stage", "cuda"), "on cores"),
        (("--peer", "torch", "--dtype", "float64"), "float32 or bfloat16"),
        (("--peer", "torch", "--peer-mode", "keep-fred"), "'keep_fred': modes are eager, best"),
    ):
        error = bench(*words).exception
        assert isinstance(error, UsageError) and said in str(error)
    done = distgpt("bench", "train", "--data", nowhere, "--steps", "1", "--out", tmp_path)
    assert done.returncode == 65 and done.stderr.splitlines()[-1].startswith(f"distgpt: '{nowhere}' is no")
    assert not list(tmp_path.glob("*.json"))
