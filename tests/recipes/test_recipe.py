"""Validation, best weights, HellaSwag and further training."""

import json
import shutil

import distgpt as library
import pytest
from distgpt.commands.train import train as train_command
from distgpt.core.base.errors import UsageError
from distgpt.core.base.files import bundled
from distgpt.core.config.presets import FAMILIES
from distgpt.core.config.run_request import asked_for, resolve
from distgpt.models.formats.families import family_for
from distgpt.models.formats.gguf.transfer import family_in_gguf
from distgpt.recipes.derived import derived

from conftest import SMALL, distgpt, inside, logged, refused, slow_ranks, succeeded, validations

HELD_OUT = ["--val-fraction", "0.2", "--eval-every", "5"]
ROPE = ["--positions", "rope", "--norm", "rmsnorm", "--mlp", "swiglu", "--no-bias"]


def train(out, *words):
    succeeded("train", *SMALL, "--out", out, *words)
    return out


def evaluated(weights, *args, ranks=0):
    words = ["eval", "--weights", weights, "--threads", "1", "--json", *args]
    result = distgpt(*words, "--stage", "mpi", ranks=ranks) if ranks else inside(*words)
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_eval_scores_only_held_out_training_text(run, tmp_path):
    words = ["eval", "--weights", run, "--threads", "1", "--json", "--val"]
    found = inside(*words, bundled("data", "story.txt"))
    assert json.loads(found.stdout)["val_loss"] == pytest.approx(validations(run)[20], rel=1e-6)
    assert "scoring only the held-out 20.00%" in found.stderr
    other = tmp_path / "other.txt"
    other.write_text(bundled("data", "story.txt").read_text())
    scored = inside(*words, other)
    assert json.loads(scored.stdout)["val_tokens"] > 4 * json.loads(found.stdout)["val_tokens"]
    assert "trained on" not in scored.stderr
    whole = train(tmp_path / "whole", "--steps", "1")
    assert "story: the loss is on training data" in inside("eval", "--weights", whole, "--val", "story").stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("recipe") / "run"
    return train(out, "--steps", "20", "--save-every", "10", *HELD_OUT)


def test_best_weights_have_lowest_validation_loss(tmp_path):
    too_fast = ["--steps", "60", "--lr", "0.3", "--clip", "0", *HELD_OUT]
    out = train(tmp_path / "run", *too_fast)
    found = validations(out)
    best = min((step for step in found if step), key=found.get)
    assert best < 60, "the learning rate was meant to be too high"
    again = train(tmp_path / "again", *too_fast, "--save-every", str(best))
    at_best = library.load(again / "checkpoints" / f"step-{best:08d}" / "weights.safetensors").parameters()
    for name, array in library.load(out / "best.safetensors").parameters().items():
        assert (array == at_best[name]).all()


@slow_ranks
def test_validation_is_equal_on_any_ranks(run):
    weights = run / "weights.safetensors"
    alone = evaluated(weights, "--val", "story")
    assert alone["perplexity"] > 1 and 0 < alone["bits_per_byte"] < 8
    assert all(evaluated(weights, "--val", "story", ranks=ranks) == alone for ranks in (2, 3))


def test_eval_limits_tokens_and_extends_rope_context(run, tmp_path):
    weights = run / "weights.safetensors"
    words = (weights, "--val", "story")
    full, some = evaluated(*words), evaluated(*words, "--val-tokens", "40")
    assert some["val_tokens"] == 40 < full["val_tokens"]
    page = inside("eval", "--weights", weights, "--val", "story").stdout
    assert f"{full['perplexity']:.2f}" in page and "bits per byte" in page
    refused(inside("eval", "--weights", weights), 2, "--val", "--hellaswag")
    refused(inside("infer", "--weights", weights, "--context", "32"), 2, "learned positions", "16")
    rotary = train(tmp_path / "run", "--steps", "5", *ROPE) / "weights.safetensors"
    at_once = evaluated(rotary, "--val", "story", "--context", "64")
    assert at_once["context"] == 64 and at_once["val_loss"] != evaluated(rotary, "--val", "story")["val_loss"]
    written = inside("infer", "--weights", rotary, "--context", "64", "--max-new-tokens", "40")
    assert "40 tokens" in written.stderr


def test_hellaswag_is_scored_in_training_and_eval(tmp_path):
    file = tmp_path / "hellaswag.jsonl"
    endings = ["the lamp", "a lamp", "lamp the", "the"]
    examples = [{"ctx": "lit the lamp", "endings": endings, "label": label} for label in (0, 1, 2, 3)]
    file.write_text("\n".join(map(json.dumps, examples)))
    out = train(tmp_path / "run", "--steps", "10", "--eval-every", "5", "--hellaswag", file)
    scored = {line["step"]: line["hellaswag"] for line in logged(out) if "hellaswag" in line}
    assert scored == dict.fromkeys((0, 5, 10), 0.25)  # each of the four has another right ending
    assert evaluated(out / "weights.safetensors", "--hellaswag", file)["hellaswag_acc"] == 0.25
    file.write_text("{}")
    damaged = inside("train", "--data", "story", "--hellaswag", file, "--out", tmp_path / "x")
    refused(damaged, 65, "line 1", "endings")
    assert not (tmp_path / "x").exists()


def test_init_weights_are_trained_further_and_resumed(run, tmp_path):
    start = shutil.copy(run / "weights.safetensors", tmp_path / "start.safetensors")
    more = ["train", "--init", start, "--data", "story", "--batch-size", "8", "--threads", "1"]
    more += ["--lr", "1e-5", "--eval-every", "1", "--val-fraction", "0.2"]
    succeeded(*more, "--steps", "2", "--out", tmp_path / "more")
    assert validations(tmp_path / "more")[0] == pytest.approx(validations(run)[20], rel=1e-6)
    model = (tmp_path / "more" / "config.toml").read_text()
    assert "n_embd = 16" in model and str(start) in model
    new = ["--out", tmp_path / "new"]
    refused(inside(*more, "--n-layer", "3", *new), 2, "n_layer 2, not 3")
    refused(inside(*more, "--tokenizer", "char", *new), 65, "word", "--tokenizer auto")
    (tmp_path / "start.safetensors").unlink()
    succeeded(*more, "--steps", "3", "--out", tmp_path / "more", "--resume", "auto")
    refused(inside(*more, *new), 74, "start.safetensors")


def model(preset=None, **settings):
    return resolve(derived(asked_for(settings, preset), 1)).model


@pytest.mark.parametrize("family", FAMILIES)
def test_model_of_family_is_exportable(family):
    for config in (
        model(preset="fast", family=family, vocab_size=300),
        model(preset="sprint", family=family, vocab_size=300),
        model(family=family, vocab_size=300),
        model(depth=3, family=family, data="story", vocab_size=300),
    ):
        for export in (family_for, family_in_gguf):
            assert export(config, "mine").model_type == family
        assert config.hidden % 32 == 0  # otherwise, GGUF stores the matrix in float32
    assert model(preset="fast", family=family, window=9).window == 9
    assert family in next(param.type.choices for param in train_command.params if param.name == "family")


def test_resumed_run_keeps_its_family(tmp_path):
    words = ["train", "--family", "llama", "--data", "story", "--n-layer", 1, "--n-embd", 32, "--seq-len", 32]
    words += ["--batch-size", 4, "--threads", 1, "--out", tmp_path / "run", "--resume", "auto"]
    for steps in (2, 4):
        assert inside(*map(str, words), "--steps", str(steps)).returncode == 0
    exported = inside("weights", "export", str(tmp_path / "run"), "--out", str(tmp_path / "theirs"))
    assert "LlamaForCausalLM" in exported.stdout


@pytest.mark.parametrize("words, named", [
    ("--family qwen3 --preset gpt2", "omit --preset gpt2"),
    ("--family qwen3 --init w.safetensors", "--family and --init"),
])  # fmt: skip
def test_unsuited_family_is_rejected(words, named, tmp_path):
    refused(inside("train", *words.split(), "--out", str(tmp_path / "none")), 2, named)
    with pytest.raises(UsageError, match="did you mean 'qwen3'"):
        model(family="qwen4")
