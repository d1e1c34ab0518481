import json
import shutil

import distgpt
import numpy as np
import pytest
from complaints import done
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.model.passes import Pass
from distgpt.core.saved.modelfile import Description, read_description
from distgpt.core.saved.tensors import read_header, write_tensors
from distgpt.models.adapters import ADAPTER, AdaptedModel, adapter_layout, adapters_by_matrix, base_of, read_adapter
from distgpt.models.adapters import ADAPTERS as KIND
from distgpt.models.formats.gguf.container import read_container
from distgpt.models.formats.gguf.transfer import import_gguf
from distgpt.models.formats.huggingface import Foreign, export_model, import_model
from distgpt.models.formats.peft import PREFIX, export_adapter, import_adapter
from foreignmodels import MODERN, OF_RECIPES, SHAPES, change_json, random_model, same, shape, tensors_in
from gguffiles import rewritten_gguf
from safetensors.numpy import load_file, save_file
from test_huggingface_peer import FAMILIES, LONG, PEER, V, some_tokens, transformers

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


peer = pytest.mark.skipif(not PEER, reason="needs torch, transformers and peft")
LAYERS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
OF_GPT2 = {"r": 4, "lora_alpha": 6, "target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}
EVERY = {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"}
ADAPTERS = {
    "gpt2": OF_GPT2,
    "llama 3": EVERY,
    "qwen2": {**EVERY, "use_rslora": True},
    "qwen3": {"r": 2, "target_modules": LAYERS, "rank_pattern": {"v_proj": 5}, "alpha_pattern": {"up_proj": 3}},
}


def ignored(text):
    """Ignore notes."""


def written(path, weights, matrices="all"):
    model = read_description(weights).run.model
    train = TrainConfig(init=str(weights), lora_rank=3, lora_alpha=5.0, lora_matrices=matrices)
    run, draw = RunConfig(model, train), np.random.default_rng(4)
    tensors = {s.name: draw.normal(0, 0.3, s.shape).astype(np.float32) for s in adapter_layout(run).specs}
    write_tensors(path, tensors, Description(run, None, part=ADAPTER, base=base_of(weights)).to_metadata())
    return path


def close(ours, theirs):
    assert np.abs(ours - theirs).max() < 1e-5 * max(1, np.abs(theirs).max())


@peer
@pytest.mark.peer
def test_our_adapters_match_in_peft(tmp_path):
    jobs = []
    for name, matrices in {"odd": "all", "relu": "k,down", "llama, grouped": "all", "qwen 3": "q,v,gate"}.items():
        folder = tmp_path / name
        random_model(weights := tmp_path / f"{name}.safetensors", SHAPES[name])
        export_model(weights, folder, "float32")
        own = written(tmp_path / f"{name}.adapter", weights, matrices)
        export_adapter(own, tmp_path / f"{name}.peft", "float32", ignored)
        tokens = some_tokens(tmp_path / f"{name}.npy", SHAPES[name]["vocab_size"], SHAPES[name]["seq_len"])
        jobs.append(["adapted", str(folder), f"{folder}.peft", tokens, f"{folder}.npz"])
    transformers(*jobs)
    for _, folder, _, tokens, out in jobs:
        both = distgpt.load(f"{folder}.safetensors", adapter=f"{folder}.adapter")
        close(both.logits(np.load(tokens)), np.load(out)["logits"])


@peer
@pytest.mark.peer
def test_peft_adapters_match_with_gradients(tmp_path):
    jobs, tokens = [], some_tokens(tmp_path / "tokens.npy", V, LONG)
    for name, settings in ADAPTERS.items():
        folder, theirs = str(tmp_path / name), str(tmp_path / f"{name}.peft")
        config, size = FAMILIES[name]
        jobs += [["make", folder, size, config], ["adapt", folder, theirs, settings]]
        jobs += [["adapted", folder, theirs, tokens, f"{folder}.npz"]]
    transformers(*jobs)
    for name in ADAPTERS:
        folder, expected = tmp_path / name, np.load(tmp_path / f"{name}.npz")
        weights, adapter = (tmp_path / f"{name}.{kind}" for kind in ("safetensors", "adapter"))
        import_model(str(folder), weights, None)
        import_adapter(f"{folder}.peft", weights, adapter, ignored)
        close(distgpt.load(weights, adapter=adapter).logits(np.load(tokens)), expected["logits"])
        if name in ("gpt2", "llama 3"):  # these have one rank and one scale
            _check_gradients(weights, adapter, Foreign(folder).family, np.load(tokens), expected)


def _check_gradients(weights, adapter, family, tokens, expected):
    about = read_description(adapter)
    model = AdaptedModel(about.run, CpuKernels("float32", 2))
    KIND.load_frozen(SerialComm(), model, TrainConfig(init=str(weights)))
    for name, values in read_adapter(adapter, about).items():
        model.params[name][...] = values
    sides = [side.flatten().astype(np.int32) for side in (tokens[:, :-1], tokens[:, 1:])]
    Pass(model, len(tokens), LONG - 1, training=True).loss_and_gradients(*sides, 1.0, False)
    ours = adapters_by_matrix(about.run)
    for mapping in family.mappings(model.config):
        own = [a for a in ours.get(mapping.ours, ()) if 0 <= a.rows.start - mapping.first < mapping.rows]
        if own:
            module = PREFIX + family.full_name(mapping.theirs).removesuffix(".weight")
            a, b = (expected[f"{module}.lora_{side}.default.weight"] for side in "AB")
            # If their matrix is split into several, each has its own A, initialized from theirs.
            found = sum(model.grads[f"{each.name}.lora_a"] for each in own)
            np.testing.assert_allclose(found, a, atol=1e-4 * np.abs(a).max())
            found = np.concatenate([model.grads[f"{each.name}.lora_b"] for each in own])
            np.testing.assert_allclose(found, b, atol=1e-4 * np.abs(b).max())


@pytest.fixture
def saved(tmp_path):
    random_model(weights := tmp_path / "w.safetensors", SHAPES["llama"])
    export_adapter(written(tmp_path / "a.safetensors", weights), tmp_path / "peft", "float32", ignored)
    return weights, tmp_path / "peft"


def test_adapter_round_trips(saved, tmp_path):
    weights, folder = saved
    done("weights", "import", folder, "--weights", weights, "--out", tmp_path / "b.safetensors")
    assert same(*(tensors_in(tmp_path / f"{name}.safetensors") for name in "ab"))
    train = read_description(tmp_path / "b.safetensors").run.train
    assert (train.lora_rank, train.lora_scale, train.lora_matrices) == (3, pytest.approx(5 / 3), "all")
    for dtype in ("float16", "bfloat16"):
        done("weights", "export", tmp_path / "a.safetensors", "--out", tmp_path / dtype, "--dtype", dtype)


def test_alphas_follow_ranks(tmp_path):
    """If their matrix is split into several, the ranks add up and the scale stays."""
    random_model(weights := tmp_path / "w.safetensors", SHAPES["odd"])
    export_adapter(written(tmp_path / "a.safetensors", weights), tmp_path / "peft", "float32", ignored)
    found = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert found["rank_pattern"] and found["alpha_pattern"].keys() == found["rank_pattern"].keys()
    assert {found["r"], *found["rank_pattern"].values()} == {3, 9}
    for name, rank in found["rank_pattern"].items():
        assert found["alpha_pattern"][name] == pytest.approx(rank * 5 / 3)
    assert found["lora_alpha"] == pytest.approx(found["r"] * 5 / 3)


def test_invalid_peft_adapters_are_rejected(saved, tmp_path):
    weights, folder = saved
    ask = ["weights", "import", folder, "--out", tmp_path / "b.safetensors"]
    refused(inside(*ask), 2, "--weights")
    kept = shutil.copytree(folder, tmp_path / "kept")
    for changes, *words in (
        ({"use_dora": True}, "use_dora"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"bias": "all"}, "bias"),
        ({"peft_type": "LOHA"}, "LOHA"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa"),
        ({"lora_alpha": "much"}, "lora_alpha"),
        ({"lora_alpha": 0}, "lora_alpha"),
        ({"alpha_pattern": [1]}, "alpha_pattern"),
        ({"alpha_pattern": {"layers.[01].*": 2}}, "alpha_pattern"),
    ):
        shutil.copy(kept / "adapter_config.json", folder)
        change_json(folder / "adapter_config.json", **changes)
        refused(inside(*ask, "--weights", weights), 65, *words)
    path = folder / "adapter_model.safetensors"
    last = sorted(read_header(path).tensors)[-1].removeprefix(PREFIX).removesuffix(".lora_B.weight")
    change_json(folder / "adapter_config.json", lora_alpha=1e-300, alpha_pattern={last: 1e6})
    result = inside(*ask, "--weights", weights)
    refused(result, 65, path, f"{last}.lora_B.weight, scaled by lora_alpha, has values that are not finite")
    shutil.copy(kept / "adapter_config.json", folder)
    tensors = tensors_in(path)
    first = next(iter(tensors))
    for name, change in (
        (f"{PREFIX}lm_head.lora_A.weight", np.zeros((3, 18), np.float32)),
        (f"{PREFIX}model.layers.7.mlp.up_proj.lora_A.weight", np.zeros((3, 18), np.float32)),
        (first, np.zeros((3, 5), np.float32)),
        (first, np.full_like(tensors[first], np.nan)),
        (first, None),
    ):
        write_tensors(path, {n: x for n, x in {**tensors, name: change}.items() if x is not None}, {})
        refused(inside(*ask, "--weights", weights), 65, path)
    # The adapter is finite but its products are not, so the error must not name the model's file.
    write_tensors(path, {name: np.full_like(array, 3e38) for name, array in tensors.items()}, {})
    huge = tmp_path / "huge.safetensors"
    done("weights", "import", folder, "--out", huge, "--weights", weights)
    for words in (
        ["infer", "--prompt", "a", "--weights", weights, "--adapter", huge],
        ["infer", "--prompt", "a", "--weights", weights, "--adapter", huge, "--dtype", "int8"],
        ["weights", "merge", "--weights", weights, "--adapter", huge, "--out", tmp_path / "b.safetensors"],
    ):
        refused(inside(*words), 65, f"{huge}: the weights that blocks.", "not finite")
    random_model(other := tmp_path / "other.safetensors", shape(77, 13, 1, 3, 18, **MODERN))
    write_tensors(path, tensors, {})
    refused(inside(*ask, "--weights", other), 65, "layers.1")
    assert not (tmp_path / "b.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "matrices"), [("odd", "all"), ("llama, grouped", "all"), ("qwen 3", "q,v,gate"), ("gpt2", "k,down")]
)
def test_gguf_lora_adds_to_the_base_as_llama_cpp_does(name, matrices, tmp_path):
    """A tensor's scale is alpha over the rank of its own b; a is (rank, inputs), b (outputs, rank)."""
    base, own, gguf = (tmp_path / each for each in ("w.safetensors", "a.safetensors", "w.gguf"))
    random_model(base, {**SHAPES, **OF_RECIPES}[name])
    written(own, base, matrices)
    for source, more in ((base, ()), (own, ("--adapter",))):
        done("weights", "export", source, "--out", source.with_suffix(".gguf"), *more)
    done("weights", "export", own, "--out", tmp_path / "merged.gguf")
    lora = read_container(own.with_suffix(".gguf"))
    assert lora.metadata["general.type"] == "adapter" and lora.metadata["adapter.type"] == "lora"
    assert lora.metadata["general.architecture"] == read_container(gguf).metadata["general.architecture"]

    def add(metadata, tensors):
        for each in {each.rpartition(".")[0] for each in lora.tensors}:
            a, b = (np.concatenate([rows for _, rows in lora.rows(f"{each}.lora_{side}")]) for side in "ab")
            assert (b.shape[0], a.shape[1]) == tensors[each].shape and len(a) == b.shape[1]
            tensors[each] = tensors[each] + lora.metadata["adapter.lora.alpha"] / len(a) * b @ a

    rewritten_gguf(gguf, add)
    ours = distgpt.load(base, adapter=own).logits(tokens := np.arange(9))
    for file in (gguf, tmp_path / "merged.gguf"):
        import_gguf(file, file.with_suffix(".back"), None)
        close(distgpt.load(file.with_suffix(".back")).logits(tokens), ours)
    assert np.abs(distgpt.load(base).logits(tokens) - ours).max() > 1e-3
    for words, *told in (
        ((base, "--out", tmp_path / "new.gguf", "--adapter"), "complete model"),
        ((own, "--out", tmp_path / "new.gguf", "--adapter", "--dtype", "q8_0"), "q8_0"),
        ((own, "--out", tmp_path / "new", "--adapter"), "PEFT"),
    ):
        refused(inside("weights", "export", *words), 2, *told)
    refused(inside("infer", "--weights", own.with_suffix(".gguf"), "--prompt", "a"), 65, "base model")
    assert not list(tmp_path.glob("new*"))
