"""Models by name: the weights and their adapters, as `infer` writes with each, alone and at once."""

from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
from conftest import SMALL, inside, refused
from serving import server

from distgpt.adapters import beside
from distgpt.adapters.beside import AdaptersBeside
from distgpt.core.base.errors import UsageError
from distgpt.core.comm.resources import Memory
from distgpt.core.config import GpuConfig
from distgpt.core.cpu.stages import open_stage
from distgpt.core.generate import engine_setup
from distgpt.core.generate.engine_setup import ModelSpec
from distgpt.gpu.stage import GpuStage
from distgpt.serving import server as server_module

TEXTS = {"one": "the lamp, the fox, ", "two": "the fox and the lamp and "}
HOW = ["--threads", "1", "--seq-len", "16", "--batch-size", "8", "--lr", "5e-2", "--steps", "40"]
PROMPT = "the lamp"
ROUNDED = ("bfloat16", "int8")


def done(*args):
    result = inside(*args)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A model, and two adapters of it."""
    folder = tmp_path_factory.mktemp("models")
    done("train", *SMALL, "--steps", "100", "--out", folder / "base")
    base = folder / "base" / "weights.safetensors"
    for rank, (name, text) in enumerate(TEXTS.items(), 2):
        (folder / f"{name}.txt").write_text(100 * text)
        words = ["--data", folder / f"{name}.txt", "--lora-rank", str(rank), "--out", folder / name]
        done("train", "--init", base, *HOW, *words)
    return {"base": base, "one": folder / "one", "two": folder / "two"}


def spec_of(files, *names, dtype):
    beside = AdaptersBeside(None, [(name, files[name]) for name in names])
    return ModelSpec(files["base"], dtype, beside=beside)


def loaded_with(files, *names, dtype="float32"):
    return spec_of(files, *names, dtype=dtype).load(open_stage("serial", 2, GpuConfig()))


# The walk with adapters is compiled for each.
@pytest.fixture(
    scope="module", params=["float32", *(pytest.param(name, marks=pytest.mark.slow) for name in ROUNDED)]
)
def served(request, files):
    with server(loaded=loaded_with(files, "one", "two", dtype=request.param)) as found:
        yield found, request.param


def test_each_model_writes_what_infer_writes_with_its_adapter_also_at_once(served, files):
    running, dtype = served
    ask = ["infer", "--weights", files["base"], "--prompt", PROMPT, "--max-new-tokens", "12"]
    ask += ["--temperature", "0", "--dtype", dtype]
    expected = {"sample": done(*ask)}
    for name in ("one", "two"):
        expected[name] = done(*ask, "--adapter", files[name])
    assert len(set(expected.values())) == 3

    def told(name):
        found = running.complete(PROMPT, model=name, max_tokens=12, temperature=0, ignore_eos=False)
        assert found["model"] == name
        return found["choices"][0]["text"]

    with ThreadPoolExecutor(6) as pool:
        at_once = list(pool.map(told, [*expected, *expected]))
    for name, text in zip([*expected, *expected], at_once, strict=True):
        assert told(name) == text and (PROMPT + text).strip() == expected[name].strip()


def test_the_models_are_listed_and_another_name_says_which_there_are(served):
    running, _ = served
    listed = running.ask("/v1/models")[2]["data"]
    assert [each["id"] for each in listed] == ["sample", "one", "two"]
    assert running.ask("/v1/models/two")[2]["id"] == "two"
    for path, body in (
        ("/v1/models/three", None),
        ("/v1/completions", {"model": "three"}),
        ("/tokenize", {"model": "three", "prompt": "a"}),
    ):
        status, _, found = running.ask(path, body)
        assert status == 404 and found["error"]["code"] == "model_not_found"
        assert "'sample', 'one', 'two'" in found["error"]["message"]


def test_names_that_make_no_sense_are_refused(files):
    ask = ["serve", "--weights", files["base"], "--port", "0"]
    one = files["one"]
    refused(inside(*ask, "--adapter", f"weights={one}"), 2, "a name of its own")
    refused(inside(*ask, "--adapter", f"a={one}", "--adapter", f"a={one}"), 2, "a name of its own")
    refused(inside(*ask, "--adapter", f"a={one}", "--adapter", one), 2, "give it a name")
    refused(inside(*ask, "--adapter", f"={one}"), 2, "a name of its own")
    refused(inside(*ask, "--adapter", f"a={files['base']}"), 2, "no adapter")
    refused(inside(*ask, "--adapter", "a=nowhere"), 74, "nowhere")


def test_adapters_are_refused_before_a_model_is_read_where_none_can_be_served(files, monkeypatch):
    monkeypatch.setattr(engine_setup, "open_model", None)
    stage = open_stage("serial", 1, GpuConfig())
    gpu = GpuStage("cuda", stage.comm, 1, device=object())
    for place, dtype in ((gpu, "auto"), (stage, "float64")):
        with pytest.raises(UsageError, match="for CPUs, not in float64"):
            spec_of(files, "one", dtype=dtype).load(place)


def test_adapters_are_in_memory_before_lanes_ask_how_much_is_left(files, monkeypatch):
    order, pack = [], beside.adapters_of
    monkeypatch.setattr(beside, "adapters_of", lambda *args: order.append("adapters") or pack(*args))
    monkeypatch.setattr(
        engine_setup, "granted_memory", lambda ranks: order.append("memory") or Memory(1 << 30)
    )
    loaded_with(files, "one").slots(1, 0)
    assert order == ["adapters", "memory"]


def test_a_chat_format_is_made_once_for_all_models_with_the_same_tokenizer(files, monkeypatch):
    made = []
    monkeypatch.setattr(server_module, "ChatFormat", made.append)
    with server(loaded=loaded_with(files, "one", "two")):
        assert len(made) == 1
