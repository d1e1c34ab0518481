import shutil

import distgpt
import numpy as np
import pytest
from complaints import done
from distgpt.core.saved.tensors import read_header
from safetensors.numpy import load_file, save_file

from conftest import SMALL, inside, losses, needs_mpi, refused
from conftest import distgpt as distgpt_command

TEXT = ["--data", "story", "--threads", "1", "--seq-len", "16", "--batch-size", "8", "--lr", "2e-2"]
LORA = [*TEXT, "--steps", "40", "--save-every", "20", "--lora-rank", "2", "--val-fraction", "0.1"]


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    out = tmp_path_factory.mktemp("base") / "run"
    done("train", *SMALL, "--steps", "100", "--out", out)
    return out / "weights.safetensors"


@pytest.fixture(scope="module")
def run(base):
    out = base.parent.parent / "adapted"
    done("train", "--init", base, *LORA, "--out", out)
    return out


def test_run_files_hold_only_adapters(run, base):
    files = [run / "weights.safetensors", run / "best.safetensors"]
    for file in [*files, run / "checkpoints" / "step-00000020" / "weights.safetensors"]:
        names = set(load_file(file))
        assert {name.split(".")[4] for name in names} == {"lora_a", "lora_b"}
        assert {name.split(".")[3] for name in names} == {"q", "k", "v", "o", "up", "down"}
    assert f"adapter of rank 2 for all of {base}" in done("weights", "info", run)
    assert np.mean(losses(run)[-9:]) < np.mean(losses(run)[:9]) - 0.05


def test_adapter_run_resumes_exactly(run, tmp_path):
    half = tmp_path / "half"
    shutil.copytree(run, half)
    shutil.rmtree(half / "checkpoints" / "step-00000040")
    done("train", "--resume", half, "--threads", "1")
    for name in ("weights.safetensors", "best.safetensors"):
        assert (half / name).read_bytes() == (run / name).read_bytes()
    assert losses(half) == losses(run)


def test_adapter_is_merged_by_every_command(run, base, tmp_path):
    whole = tmp_path / "merged.safetensors"
    done("weights", "merge", "--adapter", run, "--out", whole)
    ways = [("--weights", whole), ("--weights", run), ("--weights", base, "--adapter", run)]
    for command in (
        ["infer", "--prompt", "the lamp", "--max-new-tokens", "20", "--temperature", "0"],
        ["eval", "--val", "story", "--json"],
        ["infer", "--prompt", "the lamp", "--max-new-tokens", "5", "--dtype", "int8", "--temperature", "0"],
    ):
        told = {done(*command, *map(str, way)).replace(str(way[1]), "W") for way in ways}
        assert len(told) == 1, told
    tokens = np.arange(8)
    plain, both = (distgpt.load(base, adapter=each).logits(tokens) for each in (None, run))
    assert np.abs(plain - both).max() > 1e-3
    np.testing.assert_allclose(distgpt.load(whole).logits(tokens), both, atol=1e-5)


def test_int8_model_trains_adapters(base, run, tmp_path):
    small = tmp_path / "int8.safetensors"
    done("weights", "quantize", base, "--out", small)
    refused(inside("train", "--init", small, *TEXT), 2, "--lora-rank")
    done("train", "--init", small, *LORA, "--dtype", "bfloat16", "--out", tmp_path / "run")
    np.testing.assert_allclose(losses(tmp_path / "run"), losses(run), rtol=0.03)
    done("weights", "merge", "--weights", base, "--adapter", tmp_path / "run", "--out", tmp_path / "whole")


@pytest.mark.ranks
@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize("how", ["overlapped", "sharded --dtype bfloat16", "allreduce --outer-every 2"])
def test_ranks_sum_adapter_gradients(how, base, run, tmp_path):
    alone, words = tmp_path / "alone", ["--init", base, *LORA, "--grad-sync", *how.split()]
    result = distgpt_command("train", *words, "--stage", "mpi", "--out", alone, ranks=2)
    assert result.returncode == 0, result.stderr
    tolerance = {"overlapped": 1e-4, "sharded --dtype bfloat16": 0.02}.get(how, 0.2)
    np.testing.assert_allclose(losses(alone), losses(run), rtol=tolerance)
    assert set(load_file(alone / "weights.safetensors")) == set(load_file(run / "weights.safetensors"))


def test_incompatible_adapter_options_are_rejected(base, run, tmp_path):
    out = ["--out", tmp_path / "new"]
    on_base = ["train", "--init", base, *LORA, *out]
    for words, named in (
        (["train", *LORA, *out], "--init"),
        ([*on_base, "--optimizer", "muon"], "muon"),
        ([*on_base, "--set", "lora_matrices=q,gate"], "gate"),
        ([*on_base, "--set", "lora_matrices=q,x"], "x"),
        (["train", "--init", run, *TEXT, *out], "weights merge"),
        (["weights", "quantize", run, *out], "weights merge"),
        (["weights", "merge", "--adapter", base, *out], "not an adapter"),
        (["infer", "--weights", run, "--adapter", run, "--prompt", "a"], "adapter"),
    ):
        refused(inside(*words), 2, named)
    assert not list(tmp_path.iterdir())


def test_adapter_of_another_model_is_rejected(base, run, tmp_path):
    other, wider = tmp_path / "other", tmp_path / "wider"
    done("train", *SMALL, "--steps", "1", "--seed", "2", "--out", other)
    done("train", *SMALL, "--steps", "1", "--n-layer", "1", "--out", wider)
    ask = ["infer", "--prompt", "a", "--adapter", run, "--weights"]
    for changed in (other, wider):
        refused(inside(*ask, changed), 65, "was trained for")
    moved = tmp_path / "moved.safetensors"
    shutil.move(base, moved)
    try:
        refused(inside("infer", "--prompt", "a", "--weights", run), 65, "--adapter")
        refused(inside("train", "--resume", run, "--steps", "50"), 65, "--init")
        shutil.copytree(run, tmp_path / "run")
        done("train", "--resume", tmp_path / "run", "--init", moved, "--steps", "44")
        assert done("infer", "--prompt", "a", "--weights", moved, "--adapter", run, "--max-new-tokens", "2")
        shutil.copy(other / "weights.safetensors", base)
        refused(inside("train", "--resume", run, "--steps", "50"), 65, "was trained for")
    finally:
        shutil.move(moved, base)


def test_nonfinite_adapter_is_rejected(base, run, tmp_path):
    tensors, metadata = load_file(run / "best.safetensors"), read_header(run / "best.safetensors").metadata
    next(iter(tensors.values()))[0, 0] = np.nan
    kept = {name: text for name, text in metadata.items() if "sha256" not in name}
    bad = tmp_path / "bad.safetensors"
    distgpt.core.saved.tensors.write_tensors(bad, tensors, kept)
    refused(inside("infer", "--prompt", "a", "--weights", base, "--adapter", bad), 65, "not finite")
    save_file(tensors, tmp_path / "foreign.safetensors")
    refused(inside("infer", "--prompt", "a", "--weights", tmp_path / "foreign.safetensors"), 65, "distgpt")
