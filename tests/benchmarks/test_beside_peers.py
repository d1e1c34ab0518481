import json
import sys
from functools import partial

import infer_beside_peers
import peer_process
import pytest
import train_beside_torch
from benching import RANKS, SMALL, STAGE, peak_here
from click.testing import CliRunner
from distgpt.core.base.errors import UsageError
from distgpt.core.config.presets import preset
from distgpt.measure import jobs
from distgpt.measure.bench import train

PEER = {"step_s_median": 0.2, "first_loss": 5.1, "final_loss": 5.0, "threads": 1, "peak_rss_bytes": 9}
PEER |= {"torch": "0"}

# Answers like peer_torch.py and records its requests; "compile" makes it faster.
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
    return CliRunner().invoke(train_beside_torch.main, list(map(str, words)))


@pytest.mark.ci
@pytest.mark.ranks
def test_peer_gets_our_model_and_ratios_are_of_pairs(tmp_path, monkeypatch):
    python, heard = tmp_path / "python", tmp_path / "heard"
    python.write_text(FAKE.format(python=sys.executable, heard=str(heard), peer=PEER))
    python.chmod(0o755)
    peer = ("--peer-python", python, "--rounds", 2, "--peer-mode", "eager", "--peer-mode", "best")
    size = ("--preset", "tiny-adamw", *SMALL, "--threads", 1, "--stage", STAGE)
    monkeypatch.setattr(train, "peak_gflops", partial(train.peak_gflops, seconds=0.05))
    monkeypatch.setattr(jobs, "ask", peak_here)
    done = bench(*size, "--name", "found", "--out", tmp_path, *peer)
    assert done.exit_code == 0, done.output
    requests = [json.loads(line) for line in heard.read_text().splitlines()]
    found = json.loads((tmp_path / "train-found.json").read_text())
    eager, best = found["peers"]
    assert (eager["mode"], best["mode"], len(found["runs"])) == ("eager", "compile+keep-freed", 2)
    for peer, speed in ((eager, 50), (best, 100)):
        ratios = [run["ours"]["tokens_per_s"] / speed for run in found["runs"]]
        assert peer["ratios"] == pytest.approx(ratios) and peer["ratio"] == pytest.approx(sum(ratios) / 2)
    shape = {"n_embd": 16, "bias": False, "norm_gain": True, "positions": "rope", "vocab_size": 256}
    recipe = {"threads": RANKS, "batch_size": 4, "lr": preset("tiny-adamw").train.lr, "dtype": "float32"}
    for request in requests:
        assert request["shape"].items() >= shape.items() and request.items() >= recipe.items()
    assert "× PyTorch (eager)" in " ".join(done.stdout.split())
    tried, trained = requests[:3], requests[3:]  # the fastest mode is measured once, and rounds alternate
    assert {name for name in peer_process.SWITCHES if tried[-1][name]} == {"autotune", "keep_freed"}
    assert [(each["compile"], each["keep_freed"]) for each in trained] == [(False, False), (True, True)] * 2


@pytest.mark.ci
@pytest.mark.parametrize("words, named", [
    ("--peer-python /nowhere", "torch"), ("--stage cuda", "cores"), ("--dtype float64", "float32"),
    ("--peer-mode keep-fred", "keep_fred"),
])  # fmt: skip
def test_invalid_options_are_rejected(words, named):
    error = bench(*words.split()).exception
    assert isinstance(error, UsageError) and named in str(error)


@pytest.mark.peer
def test_pytorch_trains_and_generates(tmp_path):
    pytest.importorskip("torch")
    done = bench("--preset", "tiny-adamw", *SMALL, "--threads", 1, "--rounds", 1, "--out", tmp_path)
    printed = " ".join(done.stdout.split()).replace("- ", "-")  # undo line breaks
    assert done.exit_code == 0 and "× PyTorch (keep-freed)" in printed, done.output
    changes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "seq_len": 16, "vocab_size": 50}
    shape = infer_beside_peers.shape_of(preset("gpt2", changes).model)
    # The best of five: 11 tokens take longer than one even on a busy machine.
    job = {"folder": str(tmp_path), "shape": shape, "threads": 1, "prompt": 5, "new": 11, "repeats": 5}
    asked = partial(peer_process.ask_peer, sys.executable, program="peer_inference")
    assert "transformers" in asked("models", job)["peers"]
    found = asked("measure", job | {"peer": "transformers", "dtype": "float32", "requests": 2})
    assert 0 < found["first"] < found["whole"]
