"""`distgpt replay`: steps taken again give the bits that the run has written, and what differs is found."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from distgpt.core.base.errors import UsageError
from distgpt.core.config import TrainConfig
from distgpt.core.data.textfile import resolve_data
from distgpt.core.model.optim import learning_rate
from distgpt.core.saved.tensors import read_header, read_into, write_tensors
from distgpt.measure import stages as comparing
from distgpt.measure.verification.kept import KEY
from distgpt.measure.verification.records import Record, Start
from distgpt.measure.verification.replaying import elapsed_at, refuse_other_ranks, threads_of
from hypothesis import given
from hypothesis import strategies as st

from conftest import SMALL, distgpt, inside, needs_mpi, refused


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with checkpoints of steps 8 and 12, the same bits on any number of ranks. Nobody changes it."""
    out = tmp_path_factory.mktemp("replayed") / "run"
    (out.parent / "keep.toml").write_text("keep = 2")
    words = ["--steps", "12", "--save-every", "4", "--reproducible-parts", "4"]
    words += ["--config", out.parent / "keep.toml"]
    assert inside("train", *SMALL, *words, "--out", out).returncode == 0
    return out


@pytest.fixture
def copied(run, tmp_path):
    return Path(shutil.copytree(run, tmp_path / "run"))


@pytest.fixture
def without_facts(copied):
    """A run that has not kept what its bits depend on."""
    history = copied / "history.jsonl"
    history.write_text("".join(f"{s}\n" for s in history.read_text().splitlines() if KEY not in json.loads(s)))
    return copied


def files(run):
    return {path: path.stat().st_mtime_ns for path in run.rglob("*")}


def replayed(run, steps, *words, **how):
    """Return what a replay has found, and its exit code."""
    result = how.pop("start", inside)("replay", run, "--steps", steps, "--json", *words, **how)
    return json.loads(result.stdout), result


def test_the_same_bits_from_a_checkpoint_and_from_the_first_weights(run):
    before = files(run)
    found, result = replayed(run, "9:12")
    assert (found["verdict"], found["promised"], found["begun"], result.returncode) == ("same", True, 8, 0)
    assert [kind["same"] for kind in found["kinds"].values()] == [4, 4, 4]
    assert found["weights"]["12"]["same"] == found["weights"]["12"]["compared"] > 60  # with both moments
    found, result = replayed(run, "3:8")
    assert (found["verdict"], found["promised"], found["begun"]) == ("same", True, 0)
    assert found["kinds"]["loss"]["same"] == 6 and [*found["weights"]] == ["8"]
    assert "from its first weights, which takes 2 more steps" in result.stderr
    assert files(run) == before, "a replay must leave the run as it is"


@pytest.mark.ci
@pytest.mark.ranks
@needs_mpi
def test_the_same_bits_on_two_ranks(run):
    found, result = replayed(run, "11:12", "--stage", "mpi", start=distgpt, ranks=2)
    assert (found["verdict"], found["promised"], found["ranks"]) == ("same", True, 2), result.stderr
    assert found["kinds"]["loss"]["same"] == 2 and result.returncode == 0


def test_one_bit_of_a_weight_or_a_loss_is_found(copied):
    checkpoint = copied / "checkpoints" / "step-00000012"
    file, manifest = checkpoint / "weights.safetensors", checkpoint / "manifest.json"
    header = read_header(file)
    name = next(each for each in header.tensors if each.endswith("1.mlp.fc.w"))
    tensors = {each: np.empty(entry.shape, np.float32) for each, entry in header.tensors.items()}
    read_into(file, tensors)
    tensors[name].view(np.uint32)[3, 2] ^= 1
    listed = json.loads(manifest.read_text())
    listed[file.name]["header_sha256"] = write_tensors(file, tensors, header.facts())
    manifest.write_text(json.dumps(listed))

    result = inside("replay", copied, "--steps", "9:12")
    assert result.returncode == 1 and f"the weights of step 12, {name} differs first" in result.stderr
    assert f"{name}: 1 of {tensors[name].size:,} elements" in " ".join(result.stdout.split())
    change_loss(copied, 10, 1 + 2**-23)
    result = inside("replay", copied, "--steps", "9:12")
    assert result.returncode == 1 and "the loss of step 10 differs first" in result.stderr
    assert "loss 4 3 step 10: " in " ".join(result.stdout.split())
    flip_a_bit(file)
    damaged = inside("replay", copied, "--steps", "9:12")
    assert damaged.returncode == 65 and f"{file} is corrupt" in damaged.stderr


def flip_a_bit(file):
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def test_a_damaged_checkpoint_on_the_way_is_named_and_passed_over(copied):
    file = copied / "checkpoints" / "step-00000008" / "weights.safetensors"
    flip_a_bit(file)
    result = inside("replay", copied, "--steps", "9:12")
    assert result.returncode == 0, result.stderr
    assert f"{file} is corrupt" in result.stderr and "from its first weights" in result.stderr
    assert "no usable checkpoint before step 9" in result.stderr
    assert "bitwise identical" in result.stdout and "step 8" not in result.stdout


def change_loss(run, step, factor):
    path = run / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        line["loss"] = line["loss"] * factor if line["step"] == step else line["loss"]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_without_what_the_bits_depended_on_rounding_is_told_from_more(without_facts):
    found, result = replayed(without_facts, "9:12")
    assert (found["verdict"], found["promised"], result.returncode) == ("same", False, 0)
    change_loss(without_facts, 11, 1 + 1e-6)
    found, result = replayed(without_facts, "9:12")
    assert (found["verdict"], result.returncode) == ("rounding", 0)
    assert 9e-7 < found["kinds"]["loss"]["largest"] < 2e-6
    change_loss(without_facts, 11, 1 + 1e-3)
    found, result = replayed(without_facts, "9:12")
    assert (found["verdict"], found["kinds"]["loss"]["beyond"], result.returncode) == ("different", 11, 1)


def test_steps_too_late_to_tell_rounding_from_more_are_not_called_the_same(without_facts, monkeypatch):
    """A loss that is off by more than rounding can ever be is found in any step."""
    monkeypatch.setattr(comparing, "JUDGED", 2)
    change_loss(without_facts, 11, 1 + 1e-3)
    found, result = replayed(without_facts, "11:12")
    assert (found["verdict"], result.returncode) == ("unjudged", 3)
    assert "steps 11 to 12 not judged" in result.stderr
    result = inside("replay", without_facts, "--steps", "10:12")
    assert result.returncode == 0 and "steps 11 to 12 not judged" in result.stdout
    change_loss(without_facts, 11, 2)
    found, result = replayed(without_facts, "11:12")
    assert (found["verdict"], found["kinds"]["loss"]["beyond"], result.returncode) == ("different", 11, 1)


def test_another_dtype_is_within_rounding(run):
    found, result = replayed(run, "9:12", "--dtype", "bfloat16")
    assert (found["verdict"], found["promised"], result.returncode) == ("rounding", False, 0)
    assert 1e-6 < found["kinds"]["loss"]["largest"] < 3e-2


def test_what_cannot_be_replayed_is_refused_in_a_line(run, tmp_path):
    text = resolve_data("story").read_text()
    (tmp_path / "story.txt").write_text(text.replace(" and ", " the ", 1))
    for code, words, *says in (
        (2, [run, "--steps", "10:13"], "has only 12 steps, not 13"),
        (2, [run, "--steps", "4:3"], "'4:3' must be a step or FIRST:LAST"),
        (2, [tmp_path, "--steps", "1"], "is not a run directory"),
        (2, [tmp_path / "none", "--steps", "1"], "no directory"),
        (65, [run, "--steps", "9", "--data", tmp_path / "story.txt"], "has changed since the run", "--data"),
        (65, [run, "--steps", "9", "--data", tmp_path / "gone.txt"], "gone.txt", "--data"),
    ):
        refused(inside("replay", *words), code, *says)


def test_adapters_and_the_file_that_they_stand_beside(run, tmp_path):
    base, moved = tmp_path / "base.safetensors", tmp_path / "moved.safetensors"
    shutil.copy(run / "weights.safetensors", base)
    words = ["--init", base, "--lora-rank", "2", "--steps", "2", "--batch-size", "4", "--threads", "1"]
    assert inside("train", *words, "--data", "story", "--out", tmp_path / "adapted").returncode == 0
    base.rename(moved)
    found, _ = replayed(tmp_path / "adapted", "1:2", "--init", moved)
    assert (found["verdict"], found["promised"], found["begun"]) == ("same", True, 0)
    other = run / "checkpoints" / "step-00000008" / "weights.safetensors"
    refused(inside("replay", tmp_path / "adapted", "--steps", "1:2", "--init", other), 65, "--init")


def test_ranks_and_threads_are_the_runs_where_steps_depend_on_them():
    starts = [Start(0, 2, {}, None)]
    refuse_other_ranks(4, starts, 2)
    with pytest.raises(UsageError, match="replay on 2 ranks"):
        refuse_other_ranks(4, starts, 1)
    one = SimpleNamespace(ranks=1, threads=[64])  # four ranks must not have all of its threads each
    assert [threads_of(one, 0, 1), threads_of(one, 0, 4), threads_of(one, 8, 1)] == [64, 0, 0]


@pytest.mark.ci
def test_steps_before_and_after_changed_settings(copied):
    """A resumed run with another learning rate: steps before it have the old one, and none lie across it."""
    words = ["--resume", "auto", "--out", copied, "--steps", "16", "--lr", "5e-3"]
    assert inside("train", *words).returncode == 0
    assert replayed(copied, "9:12")[0]["verdict"] == "same"
    assert replayed(copied, "13:16")[0]["verdict"] == "same"
    refused(inside("replay", copied, "--steps", "11:14"), 2, "after step 12 with", "(steps, lr)")


@given(st.sampled_from(["linear", "cosine", "wsd", "constant"]), st.floats(0, 1), st.integers(0, 99))
def test_the_time_of_a_learning_rate(schedule, elapsed, step):
    t = TrainConfig(schedule=schedule, warmup=5, train_minutes=1.0, lr=3e-3, min_lr=1e-4)
    rate = learning_rate(t, step, elapsed)
    assert learning_rate(t, step, elapsed_at(t, step, rate)) == rate
    with pytest.raises(UsageError, match="not possible with its schedule"):
        elapsed_at(t, 50, 1.0)


def test_which_batches_were_left_out(tmp_path):
    """A rollback says so; a process that began at the first weights again leaves none out."""
    events = [
        {"step": 0, "from": None, "ranks": 1, "changes": {}},
        {"step": 4, "bad": "…", "back_to": 4, "skipped": 3},
        {"step": 8, "bad": "…", "back_to": 8, "skipped": 5},
        {"step": 4, "from": "step-4", "ranks": 2, "changes": {"lr": [1e-3, 2e-3]}},
    ]

    def skipped(events):
        (tmp_path / "config.toml").write_text("")
        (tmp_path / "history.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
        return Record(tmp_path)

    assert skipped(events[:3]).skipped == {4: 3, 8: 5}
    record = skipped(events)
    assert record.skipped == {4: 3} and [start.step for start in record.starts] == [0, 4]
    assert record.settings_of(5).train.lr == record.config.train.lr and record.settings_of(4).train.lr == 1e-3
    assert skipped([*events, events[0]]).skipped == {}
