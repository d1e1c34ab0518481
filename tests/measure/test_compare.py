"""`distgpt bench stages` as a user runs it: real stages, in fresh processes; and as it fails."""

import json
import os

import pytest
from click.testing import CliRunner
from distgpt.commands.bench import compare_stages
from distgpt.core.base.errors import DisagreementError
from distgpt.measure import jobs

from conftest import distgpt, inside, needs_mpi, refused

pytestmark = [needs_mpi, pytest.mark.ranks]

_MODEL = "--preset tiny-adamw --n-layer 2 --n-head 2 --n-embd 16 --seq-len 16"
MODEL = f"{_MODEL} --batch-size 8 --threads 1".split()
SHORT = [*MODEL, "--steps", "12", "--stages", "serial,mpi"]


def result_in(folder):
    return json.loads((folder / "compare.json").read_text())


@pytest.mark.ci
def test_both_stages_are_measured_and_agree_and_what_it_leaves_can_be_shared(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result, folder = compare(*SHORT, "--out", "both"), tmp_path / "both"
    assert result.exit_code == 0, result.output
    report = result_in(folder)
    assert report["state"] == "done" and report["passed"]
    serial, mpi = report["stages"]
    assert [serial["stage"], mpi["stage"], mpi["ranks"], mpi["threads"]] == ["serial", "mpi", 2, 1]
    (difference,) = report["differences"]
    for stage in (serial, mpi):
        lines = (folder / stage["stage"] / "metrics.jsonl").read_text().splitlines()
        assert stage["losses"] == [json.loads(line)["loss"] for line in lines] and len(lines) == 12
        summary = json.loads((folder / stage["stage"] / "summary.json").read_text())
        assert stage["training"]["train_s"] == summary["train_s"]
        assert len(stage["training"]["peak_memory"]) == stage["ranks"]
        faster = summary["tokens_per_s"] / serial["training"]["tokens_per_s"]
        for shown in (
            f"{summary['train_s']:,.2f} {summary['first_step_s']:,.2f} {faster:.2f}",
            f"{summary['loss']:.4f} {summary['train_bits_per_byte']:.4f}",
        ):
            assert shown in " ".join(result.stdout.split())
        assert len(stage["inference"]["tokens"]) == 30
    relative = [abs(a - b) / abs(b) for a, b in zip(mpi["losses"], serial["losses"], strict=True)]
    assert difference["largest"] == max(relative) <= difference["tolerance"] < 1e-3
    assert difference["agrees"] and mpi["inference"]["tokens"] == serial["inference"]["tokens"]
    for word in ("tokens/s", "× serial", f"{difference['largest']:.2e}"):
        assert word in result.stdout
    text = (folder / "compare.json").read_text()
    assert str(tmp_path) not in text and os.uname().nodename not in text
    assert not list(folder.glob("*/checkpoints"))


def compare(*words):
    """The command in this process; its stages are processes all the same."""
    return CliRunner().invoke(compare_stages, list(map(str, words)))


@pytest.mark.slow
def test_what_computes_something_else_and_what_dies_are_named_and_the_others_finish(tmp_path, monkeypatch):
    """With another learning rate, the loss before the first step is still the same."""
    changes = {("serial", "infer"): ["--max-new-tokens", "-1"], ("mpi", "train"): ["--lr", "0.1"]}
    plain = jobs.start
    monkeypatch.setattr(
        jobs,
        "start",
        lambda words, *how: plain([*words, *changes.get((words[words.index("--stage") + 1], words[0]), [])], *how),
    )
    result = compare(*SHORT, "--steps", "3", "--ranks", "1", "--out", tmp_path / "out", "--json")
    assert isinstance(result.exception, DisagreementError) and result.exception.exit_code == 1
    words = str(result.exception)
    assert words.startswith("stage mpi: the loss of step 2 differs from serial's by 0.")
    assert "; stage serial died in inference: " in words
    report = json.loads(result.stdout)
    assert not report["passed"] and report["differences"][0]["first"] == 2
    serial, mpi = report["stages"]
    assert "inference" in serial["failed"] and serial["training"] and serial["inference"] is None
    assert not mpi["failed"] and len(mpi["losses"]) == 3 and len(mpi["inference"]["tokens"]) == 30


@pytest.mark.ci
def test_interrupted_it_keeps_what_was_measured(tmp_path, monkeypatch):
    plain, out = jobs.start, tmp_path / "out"

    def start(words, *how):
        if "mpi" in words:
            raise KeyboardInterrupt
        return plain(words, *how)

    monkeypatch.setattr(jobs, "start", start)
    result = inside("bench", "stages", *SHORT, "--steps", "3", "--out", out)
    assert result.returncode == 130 and str(out) in result.stderr.splitlines()[-1]
    report = result_in(out)
    assert report["state"] == "interrupted" and not report["passed"] and "Interrupted" in result.stdout
    assert [len(stage["losses"]) for stage in report["stages"]] == [3, 0]


@pytest.mark.ci
def test_stages_that_cannot_be_compared_are_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # no GPU is found, whatever this machine has
    (tmp_path / "file").write_text("")
    for words, code, named in (
        ((*MODEL, "--stages", "serial,cuda"), 2, "cuda"),
        ((*SHORT, "--out", tmp_path / "file" / "out"), 74, str(tmp_path / "file")),
        *((("--tolerance", wrong), 2, "--tolerance") for wrong in ("inf", "nan")),
    ):
        result = inside("bench", "stages", "--out", tmp_path / "out", *words)
        assert result.returncode == code and named in result.stderr, words
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    refused(distgpt("bench", "stages", cwd=tmp_path, env={"PMI_SIZE": "2", "PMI_RANK": "0"}), 2, "one process")
    result = compare(*MODEL, "--steps", "2", "--stages", "serial", "--out", tmp_path / "out")
    assert result.exit_code == 0 and "nothing to compare it with" in result.stdout
    assert result_in(tmp_path / "out")["passed"] is None
