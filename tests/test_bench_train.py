"""bench train: real runs as children, and what is made of what they leave."""

import importlib.util
import json
import sys
from dataclasses import replace

import click
import pytest
from click.testing import CliRunner
from conftest import MPIRUN, distgpt

from distgpt.commands.bench_train import bench_train
from distgpt.commands.options import settings, stage_options
from distgpt.config import GpuConfig, RunConfig
from distgpt.config.presets import preset
from distgpt.errors import DataError, DistgptError, NonFiniteError, UsageError
from distgpt.machine.processes import Ended
from distgpt.measure.bench.failing import raise_failure
from distgpt.measure.bench.training import Wanted, _found, _peer, _started, gpu_words, page, peer_threads
from distgpt.model.counts import operations
from distgpt.model.model import Architecture

SMALL = ("--n-layer", 1, "--n-embd", 16, "--n-head", 2, "--seq-len", 16, "--batch-size", 4, "--steps", 6)
STAGE, RANKS = ("mpi", 2) if MPIRUN and importlib.util.find_spec("mpi4py") else ("serial", 1)
WANTED = Wanted("tiny", "serial", 1, 2, None, None, {}, GpuConfig(), "", 1)
MINE = {
    "stage": "serial",
    "ranks": 1,
    "threads": 1,
    "step_s_median": 0.1,
    "peak_memory": [5],
    "dtype": "float32",
}
MINE |= {"first_loss": 5.0, "final_loss": 4.0}
PEER = {"step_s_median": 0.2, "first_loss": 5.1, "final_loss": 5.0, "threads": 1, "peak_rss_bytes": 9}
PEER |= {"torch": "0"}

# Answers as peer_torch.py does, and notes what it was told.
FAKE = """#!{python}
import json, sys
if sys.argv[1] == "-c":
    print("2.0")
else:
    open({heard!r}, "w").write(json.dumps(sys.argv[1:]))
    print(json.dumps({peer!r} | {{"tokens_per_s": 100.0}}))
"""


def bench(*words, **environ):
    return distgpt("bench", "train", *map(str, words), env=environ)


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """What a command with a peer left, what it printed, and what the peer was told."""
    out = tmp_path_factory.mktemp("bench")
    python, heard = out / "python", out / "heard"
    python.write_text(FAKE.format(python=sys.executable, heard=str(heard), peer=PEER))
    python.chmod(0o755)
    peer = ("--peer", "torch", "--peer-python", python, "--rounds", 1)
    done = bench(*SMALL, "--threads", 1, "--stage", STAGE, "--name", "found", "--out", out, *peer)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "train-found.json").read_text()), done.stdout, json.loads(heard.read_text())[1:]


def test_a_run_tells_speed_memory_and_share_of_the_peak(measured):
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
    found, printed, words = measured
    (pair,) = found["runs"]
    assert found["ratios"] == [found["ratio"]] == [pytest.approx(pair["ours"]["tokens_per_s"] / 100)]
    assert words[0] == "train" and words[words.index("--n-embd") + 1] == "16"
    assert "--no-bias" in words and "rope" in words and "--no-norm-gain" not in words
    assert words[words.index("--threads") + 1] == str(RANKS)
    assert "× PyTorch" in printed
    assert ("--keep-freed" in words) == found["peer_keeps_freed"] == ("memory it has freed" in printed)


def test_the_middle_pair_counts():
    pairs = [
        (MINE | {"tokens_per_s": a}, PEER | {"tokens_per_s": b}) for a, b in ((30, 10), (8, 4), (50, 10))
    ]
    found = _found(WANTED, RunConfig(preset("microgpt").model), pairs, 2.0)
    assert found["ratios"] == [3, 2, 5] and found["ratio"] == 3
    assert [row["tokens_per_s"] for row in found["rows"]] == [30, 10]
    assert "3.00 × PyTorch" in page(found)


def test_a_peer_has_as_many_threads_as_all_ranks_together(monkeypatch):
    asked = []
    monkeypatch.setattr("distgpt.measure.bench.training.ask", lambda *words: asked.append(words))
    wanted = Wanted("gpt2", "mpi", 3, 2, None, None, {}, GpuConfig(), "python", 1)
    _peer(wanted, preset("gpt2"))
    assert peer_threads(wanted) == 6 and asked[0][3:5] == ("--threads", 6)


def test_every_setting_that_is_a_switch_is_passed_on_as_one():
    from distgpt.measure.bench.training import _SWITCHES

    command = settings(click.Command("x", callback=lambda **_: None))
    switches = {p.name: (p.opts[0], p.secondary_opts[0]) for p in command.params if p.secondary_opts}
    assert switches == _SWITCHES


@pytest.mark.parametrize("gpu", [
    GpuConfig(), GpuConfig(graphs=False, allreduce="host", deterministic=True, tf32=True)
])  # fmt: skip
def test_the_options_for_gpus_are_told_to_every_child(gpu, monkeypatch):
    command = click.command()(stage_options(lambda **given: given["gpu"]))
    assert command.main(gpu_words(gpu), standalone_mode=False) == gpu
    started = []
    monkeypatch.setattr("distgpt.measure.bench.training.run", lambda words, **_: started.append(words))
    monkeypatch.setattr("distgpt.measure.bench.training.answer", lambda *_: {})
    _started(replace(WANTED, stage="cuda", gpu=gpu), None, ["bench", "train", "--measure-peak"], True)
    assert [word for word in started[0] if word in gpu_words(gpu)] == gpu_words(gpu)


def test_a_failed_child_is_told_as_it_told_itself():
    def failure(code, errors="", output=""):
        with pytest.raises(DistgptError) as caught:
            raise_failure(Ended(code, output, errors, 1.0), "the run")
        return type(caught.value), str(caught.value)

    assert failure(65, "distgpt: no file\n") == (DataError, "no file")
    assert failure(76, "distgpt: the loss is nan\nAbort(76)\n") == (NonFiniteError, "the loss is nan")
    assert failure(-9) == (DistgptError, "the run failed (killed by SIGKILL)")
    told = "= EXIT CODE: 9\nYOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\nThis is\n"
    assert failure(9, output=told)[1] == "the run failed (exit code 9): a rank ended: Killed (signal 9)"
    assert failure(2, "usage: x\n") == (DistgptError, "the run failed (exit code 2): usage: x")
    crashed = "distgpt: internal error\nTraceback\nKeyError: 'x'\n"
    assert failure(70, crashed) == (DistgptError, "the run failed (exit code 70): KeyError: 'x'")


def test_what_makes_no_sense_is_refused(tmp_path):
    nowhere = tmp_path / "nowhere"
    for words, environ, said in (
        (("--peer", "torch", "--peer-python", nowhere), {}, "cannot import torch"),
        (("--peer", "torch", "--stage", "cuda"), {}, "on cores"),
        ((), {"PMI_SIZE": "2", "PMI_RANK": "0"}, "without a launcher"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            for key, value in environ.items():
                patch.setenv(key, value)
            found = CliRunner().invoke(bench_train, list(map(str, words)))
        assert isinstance(found.exception, UsageError) and said in str(found.exception)
    done = bench("--data", nowhere, "--steps", 1, "--out", tmp_path)
    assert done.returncode == 65 and done.stderr.splitlines()[-1].startswith(f"distgpt: '{nowhere}' is no")
    assert not list(tmp_path.glob("*.json"))
