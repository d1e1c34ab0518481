import pytest
from distgpt.commands.train import train
from distgpt.core.base.errors import UsageError
from distgpt.core.config.presets import FAMILIES
from distgpt.core.config.run_request import asked_for, resolve
from distgpt.models.formats.families import family_for
from distgpt.models.formats.gguf.transfer import family_in_gguf
from distgpt.recipes.derived import derived

from conftest import inside, refused


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
    assert family in next(param.type.choices for param in train.params if param.name == "family")


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
