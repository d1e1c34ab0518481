"""`distgpt replay` repeats steps of a run bitwise; `distgpt compare` finds the first difference of two runs."""

import json
import shutil
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from distgpt.core.base.errors import UsageError
from distgpt.core.config import SETTINGS, TrainConfig
from distgpt.core.data.textfile import resolve_data
from distgpt.core.model.optim import learning_rate
from distgpt.core.saved.tensors import read_header, read_into, write_tensors
from distgpt.measure import stages as comparing
from distgpt.measure.verification.kept import ELSEWHERE, KEY, PACKAGE, Facts
from distgpt.measure.verification.records import NEUTRAL, Record, Side, Start, why_rounding
from distgpt.measure.verification.replaying import elapsed_at, refuse_other_ranks, threads_of
from hypothesis import given
from hypothesis import strategies as st

from conftest import SMALL, ci_ranks, distgpt, inside, logged, refused, succeeded


@pytest.fixture(scope="module")
def run(tmp_path_factory):
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
    history = copied / "history.jsonl"
    history.write_text("".join(f"{s}\n" for s in history.read_text().splitlines() if KEY not in json.loads(s)))
    return copied


def files(run):
    return {path: path.stat().st_mtime_ns for path in run.rglob("*")}


def replayed(run, steps, *words, **how):
    result = how.pop("start", inside)("replay", run, "--steps", steps, "--json", *words, **how)
    return json.loads(result.stdout), result


def test_replay_repeats_from_checkpoint_and_first_weights(run):
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


@ci_ranks
def test_replay_on_two_ranks_is_identical(run):
    found, result = replayed(run, "11:12", "--stage", "mpi", start=distgpt, ranks=2)
    assert (found["verdict"], found["promised"], found["ranks"]) == ("same", True, 2), result.stderr
    assert found["kinds"]["loss"]["same"] == 2 and result.returncode == 0


def test_replay_finds_one_flipped_bit(copied):
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


def test_replay_skips_corrupt_checkpoint(copied):
    file = copied / "checkpoints" / "step-00000008" / "weights.safetensors"
    flip_a_bit(file)
    result = succeeded("replay", copied, "--steps", "9:12")
    assert f"{file} is corrupt" in result.stderr and "from its first weights" in result.stderr
    assert "no usable checkpoint before step 9" in result.stderr
    assert "bitwise identical" in result.stdout and "step 8" not in result.stdout


def change_loss(run, step, factor):
    lines = logged(run)
    for line in lines:
        line["loss"] *= factor if line["step"] == step else 1
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_replay_separates_rounding_from_differences(without_facts):
    found, result = replayed(without_facts, "9:12")
    assert (found["verdict"], found["promised"], result.returncode) == ("same", False, 0)
    change_loss(without_facts, 11, 1 + 1e-6)
    found, result = replayed(without_facts, "9:12")
    assert (found["verdict"], result.returncode) == ("rounding", 0)
    assert 9e-7 < found["kinds"]["loss"]["largest"] < 2e-6
    change_loss(without_facts, 11, 1 + 1e-3)
    found, result = replayed(without_facts, "9:12")
    assert (found["verdict"], found["kinds"]["loss"]["beyond"], result.returncode) == ("different", 11, 1)


def test_replay_does_not_judge_late_steps(without_facts, monkeypatch):
    monkeypatch.setattr(comparing, "JUDGED", 2)
    change_loss(without_facts, 11, 1 + 1e-3)
    found, result = replayed(without_facts, "11:12")
    assert (found["verdict"], result.returncode) == ("unjudged", 3) and "steps 11 to 12 not judged" in result.stderr
    result = inside("replay", without_facts, "--steps", "10:12")
    assert result.returncode == 0 and "steps 11 to 12 not judged" in result.stdout
    change_loss(without_facts, 11, 2)
    found, result = replayed(without_facts, "11:12")
    assert (found["verdict"], found["kinds"]["loss"]["beyond"], result.returncode) == ("different", 11, 1)


def test_replay_with_another_dtype_rounds(run):
    found, result = replayed(run, "9:12", "--dtype", "bfloat16")
    assert (found["verdict"], found["promised"], result.returncode) == ("rounding", False, 0)
    assert 1e-6 < found["kinds"]["loss"]["largest"] < 3e-2


def test_replay_rejects_impossible_requests(run, tmp_path):
    (tmp_path / "story.txt").write_text(resolve_data("story").read_text().replace(" and ", " the ", 1))
    for code, words, *says in (
        (2, [run, "--steps", "10:13"], "has only 12 steps, not 13"),
        (2, [run, "--steps", "4:3"], "'4:3' must be a step or FIRST:LAST"),
        (2, [tmp_path, "--steps", "1"], "is not a run directory"),
        (2, [tmp_path / "none", "--steps", "1"], "no directory"),
        (65, [run, "--steps", "9", "--data", tmp_path / "story.txt"], "has changed since the run", "--data"),
        (65, [run, "--steps", "9", "--data", tmp_path / "gone.txt"], "gone.txt", "--data"),
    ):
        refused(inside("replay", *words), code, *says)


def test_replay_of_adapters_checks_base_weights(run, tmp_path):
    base, moved = tmp_path / "base.safetensors", tmp_path / "moved.safetensors"
    shutil.copy(run / "weights.safetensors", base)
    words = ["--init", base, "--lora-rank", "2", "--steps", "2", "--batch-size", "4", "--threads", "1"]
    assert inside("train", *words, "--data", "story", "--out", tmp_path / "adapted").returncode == 0
    base.rename(moved)
    found, _ = replayed(tmp_path / "adapted", "1:2", "--init", moved)
    assert (found["verdict"], found["promised"], found["begun"]) == ("same", True, 0)
    other = run / "checkpoints" / "step-00000008" / "weights.safetensors"
    refused(inside("replay", tmp_path / "adapted", "--steps", "1:2", "--init", other), 65, "--init")


def test_replay_requires_ranks_of_the_run():
    starts = [Start(0, 2, {}, None)]
    refuse_other_ranks(4, starts, 2)
    with pytest.raises(UsageError, match="replay on 2 ranks"):
        refuse_other_ranks(4, starts, 1)
    one = SimpleNamespace(ranks=1, threads=[64])  # four ranks must not have all of its threads each
    assert [threads_of(one, 0, 1), threads_of(one, 0, 4), threads_of(one, 8, 1)] == [64, 0, 0]


@pytest.mark.ci
def test_replay_handles_settings_changed_at_resume(copied):
    """A replay before or after the resume uses the settings there; none spans it."""
    words = ["--resume", "auto", "--out", copied, "--steps", "16", "--lr", "5e-3"]
    assert inside("train", *words).returncode == 0 and replayed(copied, "9:12")[0]["verdict"] == "same"
    assert replayed(copied, "13:16")[0]["verdict"] == "same"
    refused(inside("replay", copied, "--steps", "11:14"), 2, "after step 12 with", "(steps, lr)")


@given(st.sampled_from(["linear", "cosine", "wsd", "constant"]), st.floats(0, 1), st.integers(0, 99))
def test_elapsed_at_inverts_learning_rate(schedule, elapsed, step):
    t = TrainConfig(schedule=schedule, warmup=5, train_minutes=1.0, lr=3e-3, min_lr=1e-4)
    rate = learning_rate(t, step, elapsed)
    assert learning_rate(t, step, elapsed_at(t, step, rate)) == rate
    with pytest.raises(UsageError, match="not possible with its schedule"):
        elapsed_at(t, 50, 1.0)


def test_record_lists_skipped_batches(tmp_path):
    """A rollback records them; a start from the first weights has none."""
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


SHORT = ["--steps", "6", "--save-every", "3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compared")
    for name, more in {"one": [], "same": [], "other": ["--seed", "2"]}.items():
        assert inside("train", *SMALL, *SHORT, *more, "--out", folder / name).returncode == 0
    shutil.copytree(folder / "one", folder / "later")
    resumed = ["--resume", folder / "later" / "checkpoints" / "step-00000003", "--clip", "0.1"]
    resumed += ["--threads", "1"]  # or step 4 may differ by rounding
    assert inside("train", *resumed, "--sample-every", "100").returncode == 0
    return folder


def compared(*runs):
    result = inside("compare", *runs, "--json")
    return json.loads(result.stdout), result


def test_compare_equal_runs(folder):
    found, result = compared(folder / "one", folder / "same")
    assert result.returncode == 0 and found["same"] and found["why"] == []
    assert {name: (kind["compared"], kind["same"]) for name, kind in found["kinds"].items()} == {
        **dict.fromkeys(("loss", "gradient norm"), (6, 6)),
        **dict.fromkeys(("weights", "optimizer"), (2, 2)),
    }
    assert found["settings"] == {} and found["data"] is None
    assert inside("compare", folder / "one", folder / "same").stdout.endswith("\nbitwise identical\n")


def test_compare_reads_checkpoints_and_optimizers(folder, tmp_path):
    for name in ("weights", "optimizer"):
        shutil.copytree(folder / "same", tmp_path / name)
        path = tmp_path / name / "checkpoints" / "step-00000006" / f"{name}.safetensors"
        flip_a_bit(path)
        refused(inside("compare", folder / "one", tmp_path / name), 65, path)
    shutil.copy(folder / "same" / path.relative_to(tmp_path / name), path)
    shutil.copy(folder / "other" / path.relative_to(tmp_path / name), path.parents[1] / "step-00000003")
    found, result = compared(tmp_path / "optimizer", folder / "same")
    assert result.returncode == 1 and not found["same"]
    assert (found["kinds"]["optimizer"]["first"], found["kinds"]["weights"]["first"]) == (3, None)
    shutil.rmtree(tmp_path / "optimizer" / "checkpoints")
    result = inside("compare", folder / "one", tmp_path / "optimizer")
    assert result.returncode == 0 and "no common checkpoints" in result.stdout


def test_compare_finds_another_seed(folder):
    found, result = compared(folder / "one", folder / "other")
    assert result.returncode == 1 and "the runs diverge at step 1; different settings: seed" in result.stderr
    assert (found["step"], found["kinds"]["weights"]["first"]) == (1, 3)
    assert found["settings"] == {"seed": [1337, 2]} and found["why"] == []


def test_compare_finds_settings_changed_at_resume(folder):
    found, result = compared(folder / "one", folder / "later")
    assert result.returncode == 1 and found["kinds"]["weights"]["first"] == 6
    assert found["step"] == 5, "the loss of step 4 is of weights before the change"
    assert found["settings"] == {"clip": [1.0, 0.1]}
    assert found["starts"] == ["B resumed after step 3"] and "clip" in result.stderr


def test_compare_finds_differences_without_cause(folder, tmp_path):
    change_loss(shutil.copytree(folder / "one", tmp_path / "flipped"), 4, 1 + 2**-23)
    result = inside("compare", folder / "one", tmp_path / "flipped")
    assert result.returncode == 1 and "loss 6 5 step 4: " in " ".join(result.stdout.split())
    assert "the runs diverge at step 4, but no setting differs" in result.stderr
    assert "distgpt replay" in result.stderr
    history = tmp_path / "flipped" / "history.jsonl"
    history.write_text(history.read_text().replace('"threads": [1]', '"threads": [2]'))
    result = inside("compare", folder / "one", tmp_path / "flipped")
    assert "by rounding: threads: 1 × 1 in A, 1 × 2 in B" in result.stderr


def test_compare_rejects_incomparable_runs(folder, tmp_path):
    refused(inside("compare", folder / "one", tmp_path), 2, "is not a run directory")
    shutil.copytree(folder / "one", tmp_path / "empty")
    (tmp_path / "empty" / "metrics.jsonl").unlink()
    refused(inside("compare", folder / "one", tmp_path / "empty"), 2, "no step in common")
    (tmp_path / "empty" / "history.jsonl").write_text('{"step": "x"}\n')
    shutil.copy(folder / "one" / "metrics.jsonl", tmp_path / "empty")
    refused(inside("compare", folder / "one", tmp_path / "empty"), 65, "line 1 has an invalid step")


ONE = Facts(
    sources="1", versions={"distgpt": "1.0", "numpy": "2.0"}, processors=["znver4-1"], threads=[4], nodes=[1],
    matmul="own kernels", exchange="alone", transport="", mpi="", micro_batches=1, recompute="mlp",
    data="crc32:1",
)  # fmt: skip
FOUR = replace(ONE, threads=[1] * 4, nodes=[2, 2], exchange="allreduce", mpi="MPICH 4")
GPU = replace(ONE, threads=[0], processors=["H100"], matmul="", gpu={"deterministic": "True"})
CONFIG = TrainConfig()
PARTS = replace(CONFIG, reproducible_parts=8)
SHARDED = replace(PARTS, optimizer="muon", grad_sync="sharded")


def reasons(one, other, t=CONFIG, now=None):
    return "; ".join(why_rounding(Side(one, t, "in the run"), Side(other, now or t, "here")))


@pytest.mark.parametrize("one, other, how", [
    (ONE, replace(ONE, data="2", recompute="none", versions={**ONE.versions, "distgpt": "2"}), {}),
    (FOUR, FOUR, {}),
    (FOUR, replace(ONE, threads=[8]), {"t": PARTS}),
    (FOUR, FOUR, {"t": SHARDED}),
    (GPU, GPU, {}),
])  # fmt: skip
def test_replay_promises_equal_bits(one, other, how):
    assert reasons(one, other, **how) == reasons(other, one, **how) == ""


@pytest.mark.parametrize("one, other, says, how", [
    (None, ONE, "no record of the environment in the run", {}),
    (ONE, replace(ONE, sources="2"), "sources: 1 in the run, 2 here", {"t": PARTS}),
    (ONE, replace(ONE, versions={"distgpt": "1.0", "numpy": "3"}), "numpy: 2.0 in the run, 3 here", {}),
    (ONE, replace(ONE, processors=["znver5-2"]), "processors: 1 × znver4-1 in the run, 1 × znver5-2", {}),
    (ONE, replace(ONE, matmul="BLAS"), "matmul: own kernels in the run, BLAS here", {"t": PARTS}),
    (ONE, ONE, "float32 in the run, bfloat16 here", {"now": replace(CONFIG, dtype="bfloat16")}),
    (ONE, FOUR, "threads: 1 × 4 in the run, 4 × 1 here", {}),
    (ONE, FOUR, "threads: 1 × 4 in the run, 4 × 1 here", {"t": PARTS, "now": CONFIG}),
    (ONE, replace(ONE, micro_batches=2), "micro_batches: 1 in the run, 2 here", {}),
    (FOUR, replace(FOUR, exchange="overlapped"), "exchange: allreduce in the run, overlapped here", {}),
    (FOUR, replace(FOUR, mpi="Open MPI 5"), "mpi: MPICH 4 in the run, Open MPI 5 here", {}),
    (FOUR, replace(FOUR, nodes=[4]), "nodes: 2 × 2 in the run, 1 × 4 here", {}),
    (FOUR, FOUR, "measures the ranks", {"t": replace(CONFIG, balance="auto")}),
    (ONE, FOUR, "threads", {"t": SHARDED}),
    (FOUR, FOUR, "grad_sync", {"t": SHARDED, "now": replace(SHARDED, grad_sync="allreduce")}),
    (GPU, ONE, "gpu: ", {"t": PARTS}),
    (*[replace(GPU, gpu={"deterministic": "False"})] * 2, "without --deterministic", {}),
    (GPU, replace(GPU, recompute="all"), "recompute: mlp in the run, all here", {}),
    (replace(ONE, processors=["a", "b"]), replace(ONE, processors=["a", "b"]), "different kinds", {}),
])  # fmt: skip
def test_replay_explains_expected_rounding(one, other, says, how):
    assert says in reasons(one, other, **how)


def test_display_settings_are_neutral_and_other_paths_exist():
    assert all(path.exists() for path in ELSEWHERE) and PACKAGE / "core" not in ELSEWHERE
    beside = {name for name, about in SETTINGS.items() if about.group in ("saving", "display")}
    assert {"keep", "sample_every"} < beside <= NEUTRAL <= {each.name for each in fields(TrainConfig)}
