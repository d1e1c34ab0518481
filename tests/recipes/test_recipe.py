"""Validation, best weights, HellaSwag, further training, and tuning on chats."""

import io
import json
import re
import shutil
import signal
import sys
from dataclasses import replace
from itertools import pairwise

import distgpt as library
import numpy as np
import pytest
from chattemplates import settings
from distgpt.commands.train import train as train_command
from distgpt.core.base.errors import UsageError
from distgpt.core.base.files import bundled
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.config.presets import FAMILIES
from distgpt.core.config.run_request import asked_for, resolve
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.stages import open_stage
from distgpt.core.data.loading import DataRequest
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.core.generate.engine_setup import ModelSpec
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.optim import AdamW
from distgpt.core.model.passes import Pass
from distgpt.core.ops.api import IGNORE_INDEX
from distgpt.core.ops.kernels import Kernels
from distgpt.core.saved.modelfile import Description, read_description, save_model
from distgpt.core.train.step import Step
from distgpt.corpora.chats.examples import CHATS as LOADING
from distgpt.corpora.chats.examples import ExampleBatches, Examples
from distgpt.inference.serving.server import served_model
from distgpt.models.formats.families import family_for
from distgpt.models.formats.gguf.transfer import family_in_gguf
from distgpt.recipes.derived import derived
from families import write_family
from steps import build_step
from stopping import at_call
from threadranks import on_all_ranks

from conftest import (
    SMALL,
    ci_ranks,
    distgpt,
    inside,
    logged,
    losses,
    popen,
    refused,
    slow_ranks,
    succeeded,
    validations,
)
from models import VARIANTS

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


SAMPLE = bundled("weights", "sample.safetensors")
CHATS = {
    "Who keeps the light?": "Old Marta keeps it.",
    "Where is the harbour?": "North of the hill.",
    "What colour is the boat?": "The boat is red.",
    "When does the ferry leave?": "At six in the morning.",
    "Who rows?": "Nobody.",
}
ROWS = [{"prompt": question, "completion": answer} for question, answer in CHATS.items()]
SHAPE = ["--batch-size", "2", "--threads", "1", "--progress", "plain", "--dtype", "float32"]


def written(path, *rows):
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def chats(tmp_path_factory):
    return written(tmp_path_factory.mktemp("data") / "chats.jsonl", *ROWS)


def tune(chats, out, *words):
    return inside("tune", "--weights", SAMPLE, "--data", chats, "--out", out, *SHAPE, *words)


def tuned(chats, out, *words):
    result = tune(chats, out, *words)
    assert result.returncode == 0, result.stderr
    return result.stdout


def random_examples(vocab, lengths, seed=0):
    random = np.random.default_rng(seed)
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    inputs, targets = (random.integers(0, vocab, starts[-1]) for _ in range(2))
    targets[random.random(len(targets)) < 0.5] = IGNORE_INDEX
    targets[starts[1:] - 1] = 1
    return Examples(inputs.astype(np.uint16), targets.astype(np.int32), starts)


def sequences(batches, step, seq_len, rows=4):
    x, y, positions = np.zeros((3, rows, seq_len), np.int32)
    batches.fill(step, slice(None), x, y, positions)
    assert batches.counted_fraction(step) == (y != IGNORE_INDEX).mean()
    found = []
    for row in range(rows):
        for first, last in pairwise([*np.flatnonzero(positions[row] == 0), seq_len]):
            assert (positions[row, first:last] == np.arange(last - first)).all()
            if (y[row, first:last] != IGNORE_INDEX).any():
                found.append((x[row, first:last], y[row, first:last]))
    return found


def test_examples_are_whole_and_once_per_epoch():
    lengths = np.random.default_rng(1).integers(1, 33, 200)
    examples = random_examples(90, lengths)
    batches = ExampleBatches(examples, 32, 4, seed=5)
    rows = batches.windows_per_epoch
    assert rows < 1.1 * lengths.sum() / 32
    found = [pair for step in range(rows // 4) for pair in sequences(batches, step, 32)]
    seen = [(x.tobytes(), y.tobytes()) for x, y in found]
    ends = pairwise(examples.starts)
    known = {(examples.read(a, b).astype(np.int32).tobytes(), examples.targets[a:b].tobytes()) for a, b in ends}
    assert set(seen) <= known and len(seen) == len(set(seen)) >= 0.97 * len(known)
    assert sum((y != IGNORE_INDEX).sum() for _, y in found) >= 0.97 * (examples.targets != IGNORE_INDEX).sum()


def test_long_examples_are_truncated_or_dropped(chats, tmp_path):
    rows = [*ROWS, {"prompt": "A long question, " * 9, "completion": "lost"}, {"text": "All of it. " * 20}]
    path, said = written(tmp_path / "chats.jsonl", *rows), []
    request = DataRequest(str(path), seq_len=80, existing=load_tokenizer("byte", ""))
    found = LOADING.load(SerialComm(), request, said.append).train
    # A long text is split instead: 220 bytes are three examples.
    assert len(said) == 1 and re.match(r"1 of 9 examples .*81 tokens \(--seq-len\).* 1 without an answer", said[0])
    assert len(found.starts) == len(ROWS) + 4 and max(np.diff(found.starts)) == 80
    parts = LOADING.load(SerialComm(), replace(request, val_fraction=0.4), said.append)
    assert (len(parts.train.starts), len(parts.val.starts)) == (6, 4)
    assert parts.train.fingerprint != found.fingerprint


def with_weights(config, kernels, ranks=1):
    model = Model(Architecture(config), kernels)
    for name, values in model.initial(3):
        model.weights[name][...] = values
    model.allocate_master_weights(ranks)
    return model


def one_by_one(config, pairs):
    model = with_weights(config, Kernels("float64"))
    total, gradient, counted = 0.0, 0.0, 0
    for inputs, targets in pairs:
        work = Pass(model, 1, len(inputs), training=True)
        work.loss_and_gradients(inputs, targets, len(inputs), False)
        total += float(model.grads.flags[0])
        gradient += model.grads.flat.copy()
        counted += (targets != IGNORE_INDEX).sum()
    return total / counted, gradient / counted


@pytest.mark.parametrize("name", ["gpt2", "grouped queries", "modern"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(1, 1), (2, 1), (1, 2)])
def test_step_averages_all_answers_of_the_batch(name, ranks, micro_batches):
    config = replace(VARIANTS[name], seq_len=16)
    examples = random_examples(config.vocab_size, [16, 3, 1, 9, 12, 5, 2, 7, 16, 4])
    t = TrainConfig(batch_size=4, chats=True, grad_accum=micro_batches, recompute="mlp", dtype="float32")
    batches = ExampleBatches(examples, 16, 4, seed=1)
    loss, gradient = one_by_one(config, sequences(batches, 0, 16))

    def work(comm):
        model = with_weights(config, CpuKernels("float32", 1), comm.size)
        result = build_step(AdamW(model, t), comm, t).launch(0, ExampleBatches(examples, 16, 4, seed=1))
        return *result.wait()[:2], model.grads.flat / (comm.size * batches.counted_fraction(0))

    for found, norm, summed in on_all_ranks(ranks, work):
        np.testing.assert_allclose(found, loss, rtol=1e-6)
        np.testing.assert_allclose(norm, np.linalg.norm(gradient), rtol=1e-5)
        np.testing.assert_allclose(summed, gradient, rtol=0, atol=1e-6)


def test_tuned_run_evaluates_answers_and_keeps_tokenizer(chats, tmp_path):
    out = tmp_path / "run"
    said = tuned(chats, out, "--epochs", "2", "--val", str(chats), "--eval-every", "2")
    found = re.search(r"5 examples of .* in (\d) sequences, .* full: .* epochs are (\d) steps of 2 seq", said)
    assert found and int(found[2]) == int(found[1]) and len(losses(out)) == int(found[2])
    assert f"chat --weights {out / 'best.safetensors'}" in said and "is also the training text" in said
    last = [*validations(out).values()][-1]
    measured = inside("eval", "--weights", out / "weights.safetensors", "--val", chats, "--chats", "--json")
    scored = [line["val_tokens"] for line in logged(out) if "val_tokens" in line]
    assert json.loads(measured.stdout)["val_tokens"] == scored[-1] > 5
    assert json.loads(measured.stdout)["val_loss"] == pytest.approx(last, rel=1e-6)
    assert "BPE" in inside("weights", "info", out / "weights.safetensors").stdout


def test_tuned_run_resumes_bitwise_identical(chats, tmp_path, monkeypatch):
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    words = ("--epochs", "3", "--val-fraction", "0.3", "--eval-every", "3")
    tuned(chats, whole, *words)
    with monkeypatch.context() as patched:
        at_call(patched, Step, "launch", 3, signal.SIGTERM)
        assert tune(chats, halves, *words).returncode == 143
    assert len(losses(halves)) == 3
    refused(tune(chats, halves, *words), 2, "already contains this run; add --resume auto")

    def resumed(out, *more):
        return succeeded("tune", "--out", out, "--resume", "auto", "--threads", "1", *more).stdout

    assert "changed from" not in resumed(halves) and losses(halves) == losses(whole)
    assert (halves / "weights.safetensors").read_bytes() == (whole / "weights.safetensors").read_bytes()
    assert "epochs 3.0 → 0.0" in resumed(halves, "--steps", "9") and len(losses(halves)) == 9
    moved = written(tmp_path / "moved" / "chats.jsonl", *ROWS, ROWS[0])
    assert "the training data has changed" in resumed(halves, "--steps", "12", "--data", moved)
    done = resumed(whole)
    assert "all 3 epochs are done" in done and "--resume auto --epochs 6" in done


def test_tuned_weights_keep_chat_template(chats, tmp_path):
    tokenizer = write_family(tmp_path / "model", "smollm2", **settings("smollm2"))
    config = replace(VARIANTS["modern"], vocab_size=tokenizer.size, seq_len=96)
    model = with_weights(config, CpuKernels("float32", 1))
    base = tmp_path / "base.safetensors"
    save_model(base, model, Description(RunConfig(config), tokenizer))
    words = ("--weights", base, "--data", chats, "--epochs", "1", "--threads", "1", "--out", tmp_path / "run")
    succeeded("tune", *words)
    kept = read_description(tmp_path / "run" / "weights.safetensors").tokenizer
    assert kept.to_json() == tokenizer.to_json() and kept.chat.source
    succeeded("infer", "--weights", tmp_path / "run", "--prompt", "a", "--max-new-tokens", "2")


def test_chat_warns_of_untuned_weights(chats, tmp_path, monkeypatch):
    run, lora = tmp_path / "run", tmp_path / "lora"
    tuned(chats, run, "--epochs", "1")
    tuned(chats, lora, "--epochs", "1", "--lora-rank", "2")
    asked = ("chat", "--threads", "1", "--max-new-tokens", "1", "--weights")
    for weights, adapter in ((SAMPLE, None), (run, None), (lora, None), (SAMPLE, lora)):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hi\n")))
        found = inside(*asked, weights, *(["--adapter", adapter] if adapter else []))
        is_taught = (weights, adapter) != (SAMPLE, None)
        assert ("not trained to chat" in found.stderr) != is_taught, (weights, adapter)
        loaded = ModelSpec(weights, "auto", part=adapter).load(open_stage("serial", 1))
        assert served_model(loaded, "it", loaded.slots(1, 0)).chats == is_taught, (weights, adapter)


def test_tune_rejects_impossible_options(chats, tmp_path):
    out = tmp_path / "run"
    refused(tune(tmp_path / "gone.jsonl", out), 65, "gone.jsonl")
    long = written(tmp_path / "long.jsonl", {"prompt": "x" * 200, "completion": "y"})
    refused(tune(long, out), 65, "no example has an answer within its first 129 tokens")
    refused(tune(chats, out, "--val-fraction", "0.01"), 65, "of 5 examples")
    refused(tune(chats, out, "--steps", "3", "--epochs", "1"), 2, "--steps and --epochs cannot be combined")
    refused(inside("tune", "--data", chats, "--out", out), 2, "requires --weights")
    refused(inside("tune", "--out", out, "--data", chats, "--resume", "auto"), 2, "requires --weights")
    assert not out.exists()


@pytest.mark.slow
def test_tuned_model_memorizes_answers(chats, tmp_path):
    tuned(chats, tmp_path / "run", "--epochs", "60", "--lr", "1e-3", "--dtype", "float32")
    asked = ("chat", "--weights", tmp_path / "run", "--temperature", "0")
    with popen(*asked, stdin=-1, stdout=-1, stderr=-1, encoding="utf-8") as process:
        said, _ = process.communicate("".join(f"/reset\n{question}\n" for question in CHATS), timeout=60)
    assert said.split("\n")[: len(CHATS)] == list(CHATS.values())


def test_dry_run_shows_examples_and_writes_nothing(chats, tmp_path):
    rows = [*ROWS, {"prompt": "Why?", "completion": "Long. " * 40}]
    path = written(tmp_path / "data" / "chats.jsonl", *rows)
    said = tuned(path, tmp_path / "run", "--dry-run", "--seq-len", "96", "--epochs", "2")
    assert said.count(" of them trained on\n") == 5 and "«Old Marta keeps it.\n\nUser:\n»" in said
    assert re.search(r"longest   .*chats.jsonl, line 6: 1\d\d tokens", said)
    assert re.search(r"cut       after 97 tokens .*: .*chats.jsonl, line 6: ", said)
    assert re.search(r"time      .* for 4 steps of ", said)
    assert [*tmp_path.iterdir()] == [path.parent]


@pytest.mark.ci
def test_tuning_stops_when_it_gets_worse_and_compares_answers(chats, tmp_path):
    out = tmp_path / "run"
    words = ["--val-fraction", "0.4", "--epochs", "60", "--lr", "5e-3", "--eval-every", "2", "--patience", "2"]
    said = tuned(chats, out, *words)
    found = [*validations(out).values()]
    last, best = len(losses(out)), int(np.argmin(found))
    # Two evaluations without a lower loss, then one step with its evaluation.
    assert best == len(found) - 4 and last == 2 * (best + 2) + 1 < 60 and min(found) < found[0]
    assert f"step {last} is the last (--patience)" in said and f"{found[0]:.4f} before the first step" in said
    assert "too few to learn more" in said and "held-out answers have only" in said
    heading, _, table, _, *rows = (out / "answers.md").read_text().splitlines()
    assert "held-out" in heading and table == "| question | before | after | in the data |" and len(rows) == 2
    for row in rows:
        _, question, before, after, wanted, _ = row.split("|")
        assert before != after and wanted.strip() in CHATS.values()
        assert CHATS[question.split("<br>")[1]] == wanted.strip()
    told = tuned(chats, tmp_path / "again", "--steps", "2")
    assert "answers   to training questions" in told and "--patience" not in told
    refused(tune(chats, tmp_path / "no", "--patience", "2", "--outer-every", "4"), 2, "--patience", "--outer-every")


@ci_ranks
def test_two_ranks_compare_answers_and_stay_finished(chats, tmp_path):
    out = tmp_path / "run"
    words = ["tune", "--stage", "mpi", "--weights", SAMPLE, "--data", chats, "--out", out, *SHAPE, "--lr", "1"]
    words += ["--val-fraction", "0.4", "--epochs", "20", "--eval-every", "1", "--patience", "1"]
    ended = distgpt(*words, ranks=2)
    assert ended.returncode == 0 and "--patience" in ended.stdout + ended.stderr, ended.stderr
    assert (out / "answers.md").exists() and len(losses(out)) < 20
    again = distgpt(*words, "--resume", "auto", ranks=2)
    assert "is finished; nothing was changed" in again.stdout + again.stderr
    refused(tune(chats, tmp_path / "no", "--patience", "2"), 2, "--val-fraction")
    refused(tune(chats, tmp_path / "no", "--data", chats), 2, "directory")
