"""The Python interface: round trips, comparison with the reference, invalid arguments, and ranks."""

import contextlib
import math
import os
import signal
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import distgpt
import numpy as np
import pytest
from distgpt.assembly import AllComponents
from distgpt.core.base.errors import DataError, DistgptError, StorageError, UsageError
from distgpt.core.base.interrupts import Interrupted
from distgpt.core.comm.api import SerialComm
from distgpt.core.data.tokenizers import BytesDecoder
from distgpt.core.model.memory import Layout
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.passes import Pass
from distgpt.core.ops.kernels import Kernels
from distgpt.core.saved.modelfile import Base, Description, read_description
from distgpt.core.train.interfaces import ModelKind, StepFlags
from distgpt.corpora import shards
from distgpt.corpora.chats.format import encode_parts
from distgpt.models.adapters import merge
from distgpt.show.weightspage import inspect

from conftest import distgpt as command
from conftest import inside, logged, losses, needs_mpi, summary

CONFIG = distgpt.ModelConfig(vocab_size=13, seq_len=7, n_layer=2, n_head=3, n_embd=24, init_std=0.2)
MODERN = replace(CONFIG, norm="rmsnorm", mlp="swiglu", positions="rope", bias=False, tied=False)


@pytest.fixture(params=[CONFIG, MODERN], ids=["gpt2", "modern"])
def model(request):
    return distgpt.init(request.param, seed=3, dtype="float64")


@pytest.fixture
def batch():
    return np.random.default_rng(0).integers(0, 13, (2, 3, 7))


def reference(model, shape, training):
    plain = Model(Architecture(model.config), Kernels("float64"))
    for name, values in model.parameters().items():
        plain.params[name][...] = values
    return Pass(plain, *shape, training=training)


def test_saved_model_loads_in_other_precisions(model, batch, tmp_path):
    model.save(tmp_path / "weights")
    back = distgpt.load(tmp_path / "weights", dtype="float64")
    assert back.config == model.config and back.tokenizer is None
    assert back.parameters().keys() == model.parameters().keys()
    for name, values in back.parameters().items():
        np.testing.assert_array_equal(values, model.parameters()[name])
    np.testing.assert_array_equal(back.logits(batch[0]), model.logits(batch[0]))
    narrow = distgpt.load(str(tmp_path / "weights"))
    assert narrow.logits(batch[0]).dtype == np.float32
    np.testing.assert_allclose(narrow.logits(batch[0]), model.logits(batch[0]), atol=1e-4)


def test_loss_and_gradients_match_reference(model, batch):
    tokens, targets = batch
    work = reference(model, (3, 7), training=True)
    work.loss_and_gradients(*(x.reshape(-1).astype(np.int32) for x in batch), 1.0, accumulate=False)
    logits, plain = model.logits(tokens), work.model.grads
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    cross_entropy = -np.take_along_axis(log_p, targets[..., None], -1).mean()
    assert [model.loss(tokens, targets)] * 2 == pytest.approx([cross_entropy, plain.flags[0]], rel=1e-12)
    gradients = model.gradients(tokens, targets)
    assert gradients.keys() == model.parameters().keys()
    for name, gradient in gradients.items():
        assert gradient.shape == model.parameters()[name].shape
        np.testing.assert_allclose(gradient, plain[name], rtol=0, atol=1e-12, err_msg=name)


def test_results_are_copies_and_parameters_are_live(model, batch):
    first, gradients, before = model.logits(batch[0]), model.gradients(*batch), model.loss(*batch)
    kept = first.copy(), {name: values.copy() for name, values in gradients.items()}
    model.logits(batch[1])
    model.gradients(*batch[::-1])
    np.testing.assert_array_equal(first, kept[0])
    for name, values in gradients.items():
        np.testing.assert_array_equal(values, kept[1][name])
        model.parameters()[name][...] -= 0.01 * values
    assert model.loss(*batch) < before


@pytest.mark.parametrize("name", ["logits", "loss", "gradients", "trace"])
def test_calls_from_threads_do_not_share_buffers(model, batch, name, monkeypatch):
    def call(ids):
        found = getattr(model, name)(*[ids, ids][: 1 + (name in ("loss", "gradients"))])
        return {"gradients": lambda: found["final_norm.w"], "trace": lambda: found.logits}.get(name, lambda: found)()

    expected, forward = [call(ids) for ids in batch] * 3, Pass.forward

    def slow(*arguments):
        found = forward(*arguments)
        time.sleep(0.01)  # another thread computes now
        return found

    monkeypatch.setattr(Pass, "forward", slow)
    with ThreadPoolExecutor(2) as threads:
        np.testing.assert_array_equal([*threads.map(call, [*batch] * 3)], expected)


def test_generate_returns_text_for_text(trained):
    model = distgpt.load(trained / "weights.safetensors")
    ids = model.tokenizer.encode("the lamp").tolist()
    text, new = model.generate("the lamp", max_new_tokens=5), model.generate(ids, max_new_tokens=5)
    assert "the lamp" + text == model.tokenizer.decode(ids + new)  # includes the first space
    assert model.generate("the lamp", 0) == "" and model.generate(ids, 0) == []
    with pytest.raises(DataError, match="zeppelin"):
        model.generate("the zeppelin")
    with pytest.raises(UsageError, match="the prompt must be a string, a list of tokens"):
        model.generate(["the", 5])


def test_generate_batches_samples_streams_and_logprobs(trained):
    model = distgpt.load(trained / "weights.safetensors")
    texts, ids = ["the lamp", "the", "the keeper of the"], [[1, 2, 3], [4]]
    how = {"temperature": 0.9, "seed": 3, "overflow": "shift", "min_p": 0.01, "repetition_penalty": 1.1}
    assert model.generate(texts, 30, **how) == [model.generate(text, 30, **how) for text in texts]
    assert model.generate(ids, 9) == [model.generate(each, 9) for each in ids]
    assert model.generate(np.array([[1, 2], [3, 4]]), 3) == model.generate([[1, 2], [3, 4]], 3)
    several = model.generate("the", 12, n=3, **how)
    assert len(set(several)) == 3 and model.generate(["the"], 12, n=1, **how) == [[several[0]]]
    pieces = model.generate("the", 12, stream=True, **how)
    assert next(pieces) and "".join(model.generate("the", 12, stream=True, **how)) == several[0]
    assert list(model.generate([1, 2], 5, stream=True)) == model.generate([1, 2], 5)
    found = model.generate([1, 2], 4, temperature=0, logprobs=2)
    scores = model.logits([1, 2])[-1].astype(float)
    expected = scores - np.log(np.exp(scores).sum())
    assert found.tokens == model.generate([1, 2], 4, temperature=0) and found.reason == "length"
    logprob, alternatives = found.likelihoods[0]
    assert logprob == pytest.approx(expected.max(), abs=1e-5) == alternatives[0][1] and len(alternatives) == 2
    scored = model.generate([1, 2, 3], 0, logprobs=1, prompt_logprobs=True).prompt_likelihoods
    assert scored[0] is None and len(scored) == 3
    chances = np.exp(model.logits([1])[-1])
    assert np.exp(scored[1].logprob) == pytest.approx(chances[2] / chances.sum())
    word = model.generate("the", 12).split()[3]
    stopped = model.generate("the", 12, stop=word, logprobs=0)
    assert stopped.reason == "stop" and word not in stopped.text and stopped.likelihoods[0].alternatives == []
    for more in ({"n": 2}, {"logprobs": 1}, {"prompt": texts}):
        with pytest.raises(UsageError, match="stream"):
            model.generate(**{"prompt": "the", "stream": True, **more})


def test_invalid_tokens_are_rejected():
    model = distgpt.init(CONFIG)
    for tokens, message in (
        (3, "shape"), ([[[1, 2]]], "shape"), ([[]], "shape"), ([[1.0, 2.0]], "float64"), ([[True]], "bool"),
        ([["a"]], "integers"), ([[1], [1, 2]], "the same length"), ([[13]], r"tokens.*\b13$"),
        ([[-1]], r"tokens.*\b13$"), ([[2**40]], r"tokens.*\b13$"), ([[1] * 8], "context of 7"),
    ):  # fmt: skip
        for call in (model.logits, model.loss, model.gradients):
            with pytest.raises(DataError, match=message):
                call(*[tokens] * (1 if call == model.logits else 2))
    with pytest.raises(DataError, match="the same shape"):
        model.loss([[1, 2]], [[1], [2]])


def test_invalid_generation_settings_are_rejected():
    model, prompts = distgpt.init(CONFIG), "a string, a list of tokens, or a list of these"
    for prompt, more, error, message in (
        ([99], {}, DataError, "13"),
        ("text", {}, UsageError, "no tokenizer"),
        *((prompt, {}, UsageError, prompts) for prompt in (5, None, {"a": 1}, np.array(3), [[1], 2])),
        ([1, "a"], {}, DataError, "integers"),
        ([1.5], {}, DataError, "integers"),
        ([1], {"seed": -1}, UsageError, "seed"),
        *(([1], {name: None}, UsageError, f"{name} must be") for name in ("top_k", "top_p")),
        *(([1], {name: "a"}, UsageError, f"{name} must be") for name in ("n", "logprobs", "min_p")),
        ([1], {"n": True}, UsageError, "n must be of type int, not True"),
        *(([1], {"stop": stop}, UsageError, "stop must be a string or a list of strings") for stop in (5, [5])),
    ):
        with pytest.raises(error, match=message):
            model.generate(prompt, **more)


def test_sharded_master_weights_are_not_saved_rounded(tmp_path, monkeypatch):
    model = distgpt.init(CONFIG, seed=3)
    monkeypatch.setattr(Model, "master_part", object())
    for act in (model.parameters, lambda: model.save(tmp_path / "w.safetensors")):
        with pytest.raises(UsageError, match="load the weights file of the run"):
            act()


def test_impossible_models_are_rejected(tmp_path):
    assert all(hasattr(distgpt, name) for name in distgpt.__all__)
    for arguments, message in (
        ({"config": "gpt-mini"}, "vocab_size"),
        ({"config": "gtp2"}, "did you mean 'gpt2'"),
        ({"stage": "seriel"}, "did you mean 'serial'"),
        ({"dtype": "float16"}, "float16"),
        ({"seed": -1}, "seed"),
    ):
        with pytest.raises(UsageError, match=message):
            distgpt.init(**{"config": CONFIG, **arguments})
    with pytest.raises(StorageError, match="nowhere"):
        distgpt.load(tmp_path / "nowhere")
    with pytest.raises(StorageError, match="nowhere"):
        distgpt.init(CONFIG).save(tmp_path / "nowhere" / "weights")


SMALL = {
    "data": "story", "tokenizer": "word", "n_layer": 1, "n_head": 2, "n_embd": 16, "seq_len": 16,
    "batch_size": 4, "steps": 6, "eval_every": 3, "val_fraction": 0.1, "sample_every": 3, "threads": 1,
}  # fmt: skip


def test_train_calls_back_and_returns_model(tmp_path):
    steps, evaluations, notes = [], [], []
    listeners = {"on_step": steps.append, "on_evaluation": evaluations.append, "on_note": notes.append}
    done = distgpt.train(**SMALL, out=tmp_path / "run", **listeners)
    assert done.directory == tmp_path / "run" and [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    assert [found["step"] for found in evaluations] == [0, 3, 6] and done.metrics == logged(done.directory)
    loaded = distgpt.load(done.directory / "weights.safetensors")
    tokens = loaded.tokenizer.encode("the lamp")
    np.testing.assert_array_equal(done.model.logits(tokens), loaded.logits(tokens))
    assert done.model.generate("the lamp", 3) == loaded.generate("the lamp", 3)
    assert done.model.trace(tokens).attention[0].shape == (2, len(tokens), len(tokens))


def test_train_matches_the_command(tmp_path, trained):
    again = distgpt.train(config=trained / "config.toml", out=str(tmp_path / "run"), threads=1)
    for name in ("weights.safetensors", "config.toml", "tokenizer.json"):
        assert (again.directory / name).read_bytes() == (trained / name).read_bytes(), name
    resumed = distgpt.train(config=trained / "config.toml", out=again.directory, resume="auto", steps=31, threads=1)
    assert [line["step"] for line in resumed.metrics if "loss" in line] == [31]
    assert str(again.directory) in repr(resumed) and "loss" not in repr(resumed)
    done = distgpt.train(out=again.directory, resume="auto", threads=1)
    assert not done.metrics and done.directory == again.directory


@pytest.mark.parametrize("data", ["text.txt", "shards"])
def test_run_survives_change_of_working_directory(tmp_path, monkeypatch, data):
    elsewhere, text = tmp_path / "elsewhere", tmp_path / "text.txt"
    elsewhere.mkdir()
    text.write_text("a lamp and a tree and a sea\n" * 99)
    monkeypatch.setattr(shards, "MOST_OPEN", 1)
    monkeypatch.chdir(tmp_path)
    words = ["--tokenizer", "byte", "--out", "shards", "--shard-tokens", "99"]
    assert inside("data", "prepare", text.name, *words).returncode == 0
    relative = {**SMALL, "data": data, "tokenizer": "byte", "save_every": 2}
    done = distgpt.train(**relative, on_step=lambda metrics: os.chdir(elsewhere))
    assert done.directory.parent == tmp_path / "runs" and len(done.metrics) == len(logged(done.directory))
    assert not [*elsewhere.iterdir()]
    monkeypatch.chdir(tmp_path)
    relative |= {"steps": 8, "out": done.directory.relative_to(tmp_path), "resume": "auto"}
    resumed = distgpt.train(**relative, on_step=lambda metrics: os.chdir(elsewhere))
    assert [line["step"] for line in resumed.metrics if "loss" in line] == [7, 8] and not [*elsewhere.iterdir()]


def test_callback_exception_ends_the_run(tmp_path):
    def refuse(metrics):
        raise ValueError(f"enough at {metrics['step']}")

    with pytest.raises(ValueError, match="enough at 1"):
        distgpt.train(**SMALL, out=tmp_path / "run", on_step=refuse)
    assert not (tmp_path / "run" / "weights.safetensors").exists() and summary(tmp_path / "run")["stop"] == "failed"


BEGIN = """
    import sys
    import distgpt, distgpt.api, distgpt.core.generate.python_api as python_api
    from distgpt.cluster.launch.environment import launched_rank

    def refuse(*args, **more):
        if launched_rank() == RANK:
            raise ValueError("no more of this")
        return former(*args, **more)

    settings = dict(stage="mpi", data="story", tokenizer="word", n_layer=1, n_head=2, n_embd=16)
    settings |= dict(seq_len=16, batch_size=4, steps=400, threads=1, out=sys.argv[1])
"""
# The rank that raises or exits, the code of all ranks, and the exit code.
CASES = {
    "a function of the caller in training raises": (0, "distgpt.train(**settings, on_step=refuse)", 70),
    "generating raises, and the caller catches it": (
        1,
        """
        former, python_api.complete = python_api.complete, refuse
        try:
            distgpt.init("microgpt", stage="mpi").generate([[1], [2]], 2000)
        except ValueError:
            pass
        """,
        70,
    ),
    "the caller's own code raises": (
        1,
        """
        try:
            distgpt.load(sys.argv[1], stage="mpi")
        except distgpt.core.base.errors.StorageError:
            print("an error of all ranks is the caller's", flush=True)
        model = distgpt.init("microgpt", stage="mpi")
        former = print
        refuse(model.generate([1], 2))
        model.generate([[1], [2]], 2)
        """,
        70,
    ),
    "a function of the caller in training leaves": (0, "distgpt.train(**settings, on_step=lambda _: sys.exit(3))", 3),
}


@pytest.mark.ranks
@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize("case", CASES)
def test_failing_rank_ends_the_job(case, tmp_path):
    rank, act, code = CASES[case]
    script = (textwrap.dedent(BEGIN) + textwrap.dedent(act)).replace("RANK", str(rank))
    ended = command(tmp_path / "out", ranks=2, program=[sys.executable, "-c", script], timeout=40)
    assert ended.returncode == code, ended.stderr
    words = (f"rank {rank}: exited with code 3",) if code == 3 else (f"rank {rank}: internal error", "no more of this")
    assert all(word in ended.stderr for word in words)
    assert ended.stdout.count("caller's") == 2 * (case == "the caller's own code raises")


SIZE = {"preset": "tiny-adamw", "n_layer": 1, "n_head": 2, "n_embd": 16, "seq_len": 16, "batch_size": 4}
SIZE |= {"data": "story", "steps": 3, "threads": 1}


class Biases(ModelKind):
    part = "biases"

    def trained(self, run):
        return Layout(spec for spec in Architecture(run.model).layout.specs if spec.name.endswith(".b"))

    def build(self, run, kernels):
        architecture, trained = Architecture(run.model), self.trained(run)
        specs = [spec for spec in architecture.layout.specs if spec.name not in trained.offsets]
        return Model(architecture, kernels, trained, {each.name: kernels.zeros(*each.shape) for each in specs})

    def describe(self, comm, run, tokenizer):
        base = Base("base", "0") if self.part else None
        return Description(run, tokenizer, part=self.part, base=base)


class Unnamed(Biases):
    part = ""


class BiasFile:
    def layout(self, run):
        return BIASES.trained(run)

    def refuse_damaged(self, run, path):
        """Accept any file."""

    def describe(self, run):
        return "biases of"

    def refuse_alone(self, path):
        raise UsageError(f"{path} holds biases alone")


BIASES, UNNAMED, FILE = Biases(), Unnamed(), BiasFile()


def part_file(self, format):
    return FILE if format == "biases" else AllComponents.part(self, format)


def train_biases(self, t):
    return BIASES


def refuse(self, t, ranks, on_gpu):
    raise UsageError("checked")


@pytest.mark.parametrize("words, members, settings", [
    ("checked", {"reject_unsuited": refuse}, {}),
    ("'Biases'", {"model": train_biases}, {"bias": False}),  # no trained tensors
    ("format .*'biases'", {"model": train_biases}, {"bias": True}),  # no reader for its files
    ("without a part", {"model": lambda self, t: UNNAMED}, {"bias": True}),
])  # fmt: skip
def test_extension_mistakes_are_rejected_before_writing(extended, tmp_path, words, members, settings):
    extended(**members)
    with pytest.raises(UsageError, match=words):
        distgpt.train(**SIZE, norm="layernorm", **settings, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_unknown_part_format_is_named(extended, tmp_path):
    extended(model=train_biases, parts=("distgpt-adapter", "biases"), part=part_file)
    trained = distgpt.train(**SIZE, bias=True, norm="layernorm", out=tmp_path / "run")
    weights = trained.directory / "weights.safetensors"
    assert read_description(weights).part == "biases" and len(losses(trained.directory)) == 3
    assert inspect(weights)["what"] == "biases of base"
    extended(parts=("distgpt-adapter", "biases"), part=part_file)
    base = distgpt.train(**SIZE, out=tmp_path / "base").directory / "weights.safetensors"
    with pytest.raises(UsageError, match="'biases'"):
        merge(base, weights, tmp_path / "merged", SerialComm())
    extended()
    with pytest.raises(DataError, match="has the unknown format 'biases'; known: distgpt-ad"):
        read_description(weights)
    with pytest.raises(DataError, match="'biases'"):
        inspect(weights)


class Callback(contextlib.nullcontext):
    def __init__(self, run, answer):
        super().__init__()
        self.run, self.answer = run, answer

    def after_step(self, done):
        return self.answer(self.run)


def end(run):
    run.signals.note(signal.SIGTERM, why="a file STOP is there")
    return {}


@pytest.mark.parametrize("answer, error, words", [
    (lambda run: {}[7], DistgptError, r"Callback .*: KeyError: 7 \(.*test_api.py:\d"),
    (lambda run: {"loss": 7.0}, DistgptError, "Callback .*: .*records loss"),
    (end, Interrupted, "a file STOP is there"),
])  # fmt: skip
def test_failing_callback_is_named(extended, tmp_path, answer, error, words):
    extended(callbacks=lambda self, run, limits: [Callback(run, answer)])
    with pytest.raises(error, match=words) as ended:
        distgpt.train(**SIZE, out=tmp_path / "run")
    assert error is DistgptError or ended.value.exit_code == 143


def test_invalid_learning_rate_names_its_class(extended, tmp_path):
    extended(learning_rate=lambda self, t, step, elapsed=None: math.nan if step else t.lr)
    with pytest.raises(UsageError, match=r"Extended\.learning_rate returned nan for step 2"):
        distgpt.train(**SIZE, out=tmp_path / "run")


MISTAKES = {
    "missing:Mine": "no module named 'missing'",
    "mistakes:Mine": "mistakes has no class 'Mine'",
    "mistakes:Other": "must be a subclass of distgpt.assembly.AllComponents",
    "mistakes:Spelled": "budgets overrides no method; did you mean 'budget'",
    "mistakes:Called": "mistakes.py:9: Called.slots must take (self, model), not (self)",
    "broken:Mine": "requires nothing_of_this_name",
}
FILE_OF_MISTAKES = """from distgpt.assembly import AllComponents
class Other: ...

class Spelled(AllComponents):
    def budgets(self): ...

class Called(AllComponents):

    def slots(self): ...
"""


@pytest.mark.parametrize("name", MISTAKES)
def test_component_mistakes_are_one_line_errors(name, tmp_path, monkeypatch):
    (tmp_path / "mistakes.py").write_text(FILE_OF_MISTAKES)
    (tmp_path / "broken.py").write_text("import nothing_of_this_name")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("DISTGPT_COMPONENTS", "")  # set by the option, undone at the end
    train = ["train", "--components", name, "--out", tmp_path / "run", "--steps", "1", "--data", "story"]
    for words, env in ((train, {}), (["infer"], {"DISTGPT_COMPONENTS": name})):
        monkeypatch.delitem(sys.modules, "mistakes", raising=False)
        result = inside(*words, env=env, cwd=tmp_path)
        assert result.returncode == 2 and MISTAKES[name] in result.stderr, result.stderr
        assert "Traceback" not in result.stderr and not (tmp_path / "run").exists()


def test_mixed_step_flags_are_rejected():
    assert StepFlags.parse_flags([0, 2, 0, 0, 0, 0, 0.5], "mine").elapsed == 0.5
    for wrong in (0.25, -1.0, math.nan):
        with pytest.raises(DistgptError, match="--grad-sync mine returned invalid step flags"):
            StepFlags.parse_flags([0, 0, 0, 0, 0, wrong, 0.5], "mine")


class Pieces(BytesDecoder):
    size = 1
    kind = "pieces"

    def encode(self, text):
        return np.array([0] * len(text.split()))


def test_chat_encoding_requires_text_slices():
    assert encode_parts(Pieces([b"word"]), ["word"])[1].tolist() == [4]
    with pytest.raises(DataError, match="'pieces' cannot encode chats"):
        encode_parts(Pieces([b"word"]), ["two words"])
