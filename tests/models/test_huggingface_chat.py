"""Models whose tokenizer is of another family, and their chat templates: imported, exported, in int8."""

import json

import pytest
from distgpt.core.saved.modelfile import read_description
from distgpt.models.quantized.rounded import quantize
from families import FAMILIES, write_family
from foreignmodels import MODERN, change_json, exported_model, shape

from conftest import inside

MODEL = shape(1000, 64, 1, 2, 16, **MODERN)
TEMPLATE = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_keeps_its_tokenizer_and_template_on_all_ways(family, tmp_path):
    folder, ours, again = tmp_path / "theirs", tmp_path / "imported.safetensors", tmp_path / "exported"
    exported_model(folder, MODEL, tokenizer=None)
    end = "<|eot_id|>" if family == "llama3" else "</s>" if family in ("tinyllama", "mistral") else "<|im_end|>"
    known = write_family(folder, family, chat_template=TEMPLATE, eos_token=end)
    change_json(folder / "generation_config.json", eos_token_id=[known.specials[end]])
    assert inside("weights", "import", folder, "--out", ours).returncode == 0
    kept = read_description(ours).tokenizer
    assert kept.chat.source == TEMPLATE and kept.chat.tokens == {"eos_token": end}
    assert kept.chat.ends == (known.specials[end],)
    assert inside("weights", "export", ours, "--out", again).returncode == 0
    generation = json.loads((again / "generation_config.json").read_text())
    assert generation["bos_token_id"] == (known.first[0] if known.first else known.separator)
    assert inside("weights", "import", again, "--out", tmp_path / "back.safetensors").returncode == 0
    assert read_description(tmp_path / "back.safetensors").tokenizer.to_json() == kept.to_json()
    quantize(ours, tmp_path / "int8.safetensors")
    assert read_description(tmp_path / "int8.safetensors").tokenizer.to_json() == kept.to_json()


def test_a_prompt_of_an_imported_model_begins_as_its_tokenizer_says(tmp_path):
    folder, ours = tmp_path / "theirs", tmp_path / "imported.safetensors"
    exported_model(folder, MODEL, tokenizer=None)
    write_family(folder, "tinyllama")
    assert inside("weights", "import", folder, "--out", ours).returncode == 0
    how = ("infer", "--weights", ours, "--max-new-tokens", "4", "--temperature", "0", "--json")
    found = json.loads(inside(*how, "--prompt", "The lamp").stdout)
    assert found["prompt"] == "The lamp"
    scored = inside(*how, "--prompt", "The lamp", "--logprobs", "0", "--prompt-logprobs").stdout
    of_prompt = json.loads(scored)["prompt_logprobs"]
    tokenizer = read_description(ours).tokenizer
    assert len(of_prompt) == 1 + len(tokenizer.encode("The lamp")) and tokenizer.first == (1,)
