import json
import random

import distgpt
import numpy as np
import pytest
from complaints import complains
from distgpt.commands.cli import cli
from distgpt.core.base.errors import DataError
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import ModelConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.core.model.model import Architecture, Model
from distgpt.core.train.assessment import Scorer
from distgpt.inference.evaluation.core_score import Core, read_tasks
from foreignmodels import exported_model, shape

BYTES = load_tokenizer("byte", "")
CONFIG = ModelConfig(vocab_size=256, seq_len=200, n_layer=1, n_head=2, n_embd=32)
WORDS = ["tide", "lamp", "rope", "mast", "gull", "salt", "bell", "pier", "oar", "net"]


def questions(kind, count=12):
    draw = random.Random(kind)
    for _ in range(count):
        first, second, third = draw.sample(WORDS, 3)
        if kind == "multiple_choice":
            yield {"query": f"Which? The {first}", "choices": [second, f"{second} {third}", third], "gold": 2}
        elif kind == "schema":
            yield {"context_options": [f"The {first}", f"A {second}"], "continuation": f"and a {third}", "gold": 1}
        else:
            yield {"context": f"The {first} and the {second} ", "continuation": draw.choice(["\x00", third])}


@pytest.fixture
def bundle(tmp_path):
    kinds = {"multiple_choice": (2, 25), "schema": (0, 50), "language_modeling": (1, 0)}
    listed, rows = ["icl_tasks:"], ["Eval Task,Task Category,Random baseline"]
    (tmp_path / "eval_data").mkdir()
    for kind, (shots, guess) in kinds.items():
        text = "".join(json.dumps(each) + "\n" for each in questions(kind))
        (tmp_path / "eval_data" / f"{kind}.jsonl").write_text(text)
        listed += [f"- label: my {kind}", f"  dataset_uri: {kind}.jsonl", f"  num_fewshot: [{shots}]"]
        listed += [f"  icl_task_type: {kind}"] + (['  continuation_delimiter: "\\nA: "'] if shots == 2 else [])
        rows.append(f"my {kind},reading,{guess}")
    (tmp_path / "core.yaml").write_text("\n".join(listed))
    (tmp_path / "eval_meta_data.csv").write_text("\n".join(rows))
    return tmp_path


def accuracy(gpt, kind, shots, delimiter):
    """Score each question of a task by itself, as nanochat describes its evaluator."""
    asked = list(questions(kind))
    random.Random(1337).shuffle(asked)

    def texts(each):
        if kind == "multiple_choice":
            return [each["query"] + delimiter + choice for choice in each["choices"]]
        if kind == "schema":
            return [context + delimiter + each["continuation"] for context in each["context_options"]]
        return [each["context"].strip() + delimiter + each["continuation"]]

    hits = []
    for i, each in enumerate(asked):
        others = random.Random(1234 + i).sample([j for j in range(len(asked)) if j != i], shots)
        before = "".join(texts(asked[j])[asked[j].get("gold", 0)] + "\n\n" for j in others)
        scores = []
        for text in texts(each):
            ids = np.frombuffer((before + text).encode(), np.uint8).astype(int)
            logits = gpt.logits(ids[None, :-1])[0].astype(float)
            losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), ids[1:]]
            if kind == "multiple_choice":
                rest = len(ids) - len(before + each["query"] + delimiter)
                for options in zip(*each["choices"], strict=False):
                    if len(set(options)) > 1:
                        break
                    rest -= 1
            elif kind == "schema":
                rest = len(delimiter + each["continuation"])
            else:
                rest = len(each["continuation"]) + len(delimiter) - len(delimiter.rstrip())
            scores.append(losses[-rest:].mean())
            greedy = (logits.argmax(1) == ids[1:])[-rest:].all()
        hits.append(greedy if kind == "language_modeling" else int(np.argmin(scores)) == each["gold"])
    return float(np.mean(hits))


def test_core_scores_questions_as_published(bundle):
    gpt = distgpt.init(CONFIG, seed=4, dtype="float64")
    model = Model(Architecture(CONFIG), CpuKernels("float64", 1))
    model.initialise(4)
    result = Core(SerialComm(), bundle, BYTES, CONFIG.seq_len).measure(Scorer(model, SerialComm()))
    expected = {
        "my multiple_choice": accuracy(gpt, "multiple_choice", 2, "\nA: "),
        "my schema": accuracy(gpt, "schema", 0, " "),
        "my language_modeling": accuracy(gpt, "language_modeling", 1, " "),
    }
    assert result["core_tasks"] == expected
    centered = [(acc - guess) / (1 - guess) for acc, guess in zip(expected.values(), (0.25, 0.5, 0), strict=True)]
    assert result["core"] == pytest.approx(np.mean(centered))


def test_long_examples_are_cut_from_the_left(bundle):
    core = Core(SerialComm(), bundle, BYTES, 30)
    spans = [span for task in core.spans for question in task for span in question]
    assert max(len(span.ids) for span in spans) == 31 and min(span.count for span in spans) >= 1


def test_eval_prints_core_and_tasks(bundle, tmp_path, capsys):
    exported_model(tmp_path / "model", shape(256, 200, 1, 2, 32))
    words = ["eval", "--weights", str(tmp_path / "ours.safetensors"), "--threads", "1", "--core", str(bundle)]
    cli.main(words, standalone_mode=False)
    shown = capsys.readouterr().out
    assert "CORE" in shown and "the mean of 3 tasks" in shown and "my schema" in shown
    cli.main([*words, "--json"], standalone_mode=False)
    assert len(json.loads(capsys.readouterr().out)["core_tasks"]) == 3


@pytest.mark.parametrize("file, old, new, message", [
    ("core.yaml", "icl_tasks", "tasks", "do not list tasks"),
    ("core.yaml", "[2]", "2", "do not list tasks"),
    ("core.yaml", "[2]", "[40]", "40 examples need more"),
    ("core.yaml", "type: schema", "type: essay", "icl_task_type 'essay'"),
    ("core.yaml", "schema.jsonl", "none.jsonl", "none.jsonl"),
    ("eval_meta_data.csv", "my schema", "another", "my schema"),
    ("eval_data/schema.jsonl", '"gold": 1', '"gold": 2', "line 1: gold must be an index below 2"),
    ("eval_data/schema.jsonl", '"continuation"', '"other"', "line 1"),
])  # fmt: skip
def test_invalid_core_file_is_rejected(bundle, file, old, new, message):
    path = bundle / file
    path.write_text(path.read_text().replace(old, new))
    with complains(message, kind=DataError):
        read_tasks(bundle)
