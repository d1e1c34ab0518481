"""`distgpt compare`: at which step two runs part, and why, by their files alone."""

import json
import shutil

import pytest

from conftest import SMALL, inside, refused

SHORT = ["--steps", "6", "--save-every", "3"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Runs: one and another the same; `later` resumed from step 3 of it with another learning rate."""
    folder = tmp_path_factory.mktemp("compared")
    for name, more in {"one": [], "same": [], "other": ["--seed", "2"]}.items():
        assert inside("train", *SMALL, *SHORT, *more, "--out", folder / name).returncode == 0
    shutil.copytree(folder / "one", folder / "later")
    resumed = ["--resume", folder / "later" / "checkpoints" / "step-00000003", "--clip", "0.1"]
    resumed += ["--threads", "1"]  # or step 4 may differ by rounding
    assert inside("train", *resumed, "--sample-every", "100").returncode == 0
    return folder


def compared(folder, one, other):
    result = inside("compare", folder / one, folder / other, "--json")
    return json.loads(result.stdout), result


def test_the_same(folder):
    found, result = compared(folder, "one", "same")
    assert result.returncode == 0 and found["same"] and found["why"] == []
    assert {name: (kind["compared"], kind["same"]) for name, kind in found["kinds"].items()} == {
        **dict.fromkeys(("loss", "gradient norm"), (6, 6)),
        **dict.fromkeys(("weights", "optimizer"), (2, 2)),
    }
    assert found["settings"] == {} and found["data"] is None
    page = inside("compare", folder / "one", folder / "same").stdout
    assert page.endswith("\nbitwise identical\n")


def test_checkpoints_are_read_and_their_optimizers_compared(folder, tmp_path):
    for name in ("weights", "optimizer"):
        shutil.copytree(folder / "same", tmp_path / name)
        path = tmp_path / name / "checkpoints" / "step-00000006" / f"{name}.safetensors"
        content = path.read_bytes()
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        refused(inside("compare", folder / "one", tmp_path / name), 65, path)
    shutil.copy(folder / "same" / path.relative_to(tmp_path / name), path)
    shutil.copy(folder / "other" / path.relative_to(tmp_path / name), path.parents[1] / "step-00000003")
    found, result = compared(folder, tmp_path / "optimizer", "same")
    assert result.returncode == 1 and not found["same"]
    assert (found["kinds"]["optimizer"]["first"], found["kinds"]["weights"]["first"]) == (3, None)
    shutil.rmtree(tmp_path / "optimizer" / "checkpoints")
    result = inside("compare", folder / "one", tmp_path / "optimizer")
    assert result.returncode == 0 and "no common checkpoints" in result.stdout


def test_another_seed(folder):
    found, result = compared(folder, "one", "other")
    assert result.returncode == 1 and "the runs diverge at step 1; different settings: seed" in result.stderr
    assert (found["step"], found["kinds"]["weights"]["first"]) == (1, 3)
    assert found["settings"] == {"seed": [1337, 2]} and found["why"] == []


def test_a_run_that_resumed_with_other_settings(folder):
    found, result = compared(folder, "one", "later")
    assert result.returncode == 1 and found["kinds"]["weights"]["first"] == 6
    assert found["step"] == 5, "the loss of step 4 is of weights before the change"
    assert found["settings"] == {"clip": [1.0, 0.1]}
    assert found["starts"] == ["B resumed after step 3"] and "clip" in result.stderr


def test_bits_that_differ_although_nothing_else_does(folder, tmp_path):
    shutil.copytree(folder / "one", tmp_path / "flipped")
    path = tmp_path / "flipped" / "metrics.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[3]["loss"] *= 1 + 2**-23
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = inside("compare", folder / "one", tmp_path / "flipped")
    assert result.returncode == 1 and "loss 6 5 step 4: " in " ".join(result.stdout.split())
    assert "the runs diverge at step 4, but no setting differs" in result.stderr
    assert "distgpt replay" in result.stderr
    history = tmp_path / "flipped" / "history.jsonl"
    history.write_text(history.read_text().replace('"threads": [1]', '"threads": [2]'))
    result = inside("compare", folder / "one", tmp_path / "flipped")
    assert "by rounding: threads: 1 × 1 in A, 1 × 2 in B" in result.stderr


def test_what_cannot_be_compared_is_refused(folder, tmp_path):
    refused(inside("compare", folder / "one", tmp_path), 2, "is not a run directory")
    shutil.copytree(folder / "one", tmp_path / "empty")
    (tmp_path / "empty" / "metrics.jsonl").unlink()
    refused(inside("compare", folder / "one", tmp_path / "empty"), 2, "no step in common")
    (tmp_path / "empty" / "history.jsonl").write_text('{"step": "x"}\n')
    shutil.copy(folder / "one" / "metrics.jsonl", tmp_path / "empty")
    refused(inside("compare", folder / "one", tmp_path / "empty"), 65, "line 1 has an invalid step")
