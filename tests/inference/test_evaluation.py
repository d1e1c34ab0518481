import csv
import json
import math
import random
from dataclasses import replace

import distgpt
import numpy as np
import pytest
from complaints import complains
from distgpt.commands.cli import cli
from distgpt.commands.generate import BENCHMARKS
from distgpt.core.base.errors import DataError, DistgptError, UsageError
from distgpt.core.base.files import bundled
from distgpt.core.comm.api import SerialComm
from distgpt.core.config import ModelConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.cpu.stages import open_stage
from distgpt.core.data.batches import ArrayTokens, windows_of
from distgpt.core.data.textfile import read_text, resolve_data
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.core.model.model import Architecture, Model
from distgpt.core.saved.modelfile import load_model, read_description
from distgpt.core.train import assessment
from distgpt.core.train.assessment import Scorer, Span, Validation
from distgpt.inference.evaluation.benchmark import LINES, Benchmark, Question, likelihoods, read_questions
from distgpt.inference.evaluation.core_score import Core, read_tasks
from distgpt.inference.evaluation.evaluate import evaluate
from foreignmodels import exported_model, shape
from threadranks import on_all_ranks

CONFIG = ModelConfig(vocab_size=256, seq_len=700, n_layer=2, n_head=2, n_embd=16)
BYTES = load_tokenizer("byte", "")


def lines(path, *objects):
    path.write_text("".join(json.dumps(each) + "\n" for each in objects))
    return path


def rows(path, *rows):
    path.parent.mkdir(exist_ok=True, parents=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def hellaswag(folder):
    made = {"ind": 4, "activity_label": "Cooking", "ctx_a": "A cook [title] stirs.", "ctx_b": "then he"}
    made |= {"ctx": "A cook stirs. then he", "label": "2", "source_id": "wikihow~1", "split": "val"}
    path = lines(folder / "hellaswag_val.jsonl", {**made, "endings": ["a", "b  [x]c", "eats.", "d"]})
    context = "Cooking: A cook.  stirs. Then he".replace("  ", " ")
    return path, [Question([(context, f" {text}") for text in ("a", "b c", "eats.", "d")], 2)]


def arc(folder):
    def made(labels, key):
        choices = [{"text": f"answer {label}", "label": label} for label in labels]
        return {"id": "Q1", "question": {"stem": "Which?", "choices": choices}, "answerKey": key}

    path = lines(folder / "ARC-Easy-Test.jsonl", made("ABCDE", "D"), made("123", "2"))
    asked = "Question: Which?\nAnswer:"
    letters = Question([(asked, f" answer {label}") for label in "ABCDE"], 3)
    return path, [letters, Question([(asked, f" answer {label}") for label in "123"], 1)]


def piqa(folder):
    path = lines(folder / "valid.jsonl", *[{"goal": "To cut", "sol1": "use a knife", "sol2": "hum"}] * 2)
    (folder / "valid-labels.lst").write_text("0\n1\n")
    choices = [("Question: To cut\nAnswer:", text) for text in (" use a knife", " hum")]
    return path, [Question(choices, 0), Question(choices, 1)]


def winogrande(folder):
    made = {"qID": "1", "sentence": "Ann met Eve and _ smiled.", "option1": "Ann", "option2": "Eve"}
    path = lines(folder / "dev.jsonl", {**made, "answer": "2"}, made)
    (folder / "dev-labels.lst").write_text("2\n1\n")
    choices = [(f"Ann met Eve and {name}", " smiled.") for name in ("Ann", "Eve")]
    return path, [Question(choices, 1), Question(choices, 0)]


def lambada(folder):
    path = folder / "lambada_test_plain_text.txt"
    path.write_text("the sea was calm and so was the boat\nno one saw him\n")
    begun = Question([("the sea was calm and so was the", " boat")], 0)
    return path, [begun, Question([("no one saw", " him")], 0)]


def mmlu(folder):
    rows(folder / "test" / "high_school_art_test.csv", ["Who, then? ", "a", "b", "c", "d", "B"])
    rows(folder / "test" / "law_test.csv", ['"Why"\n2?', "a", "b", "c", "d", "D"])
    for subject in ("high_school_art", "law"):
        shots = [[f"Q{i}", "1", "2", "3", "4", "ABCD"[i % 4]] for i in range(6)]
        rows(folder / "dev" / f"{subject}_dev.csv", *shots)
    shown = [f"Q{i}\nA. 1\nB. 2\nC. 3\nD. 4\nAnswer: {'ABCD'[i % 4]}\n\n" for i in range(5)]

    def expected(about, question, right, topic):
        head = f"The following are multiple choice questions (with answers) about {about}.\n\n"
        context = head + "".join(shown) + f"{question}\nA. a\nB. b\nC. c\nD. d\nAnswer:"
        return Question([(context, f" {letter}") for letter in "ABCD"], right, topic)

    art = expected("high school art", "Who, then?", 1, "high_school_art")
    return folder, [art, expected("law", '"Why"\n2?', 3, "law")]


PUBLISHED = {"hellaswag": hellaswag, "arc_easy": arc, "arc_challenge": arc, "piqa": piqa}
PUBLISHED |= {"winogrande": winogrande, "lambada": lambada, "mmlu": mmlu}


@pytest.mark.parametrize("name", PUBLISHED)
def test_benchmark_file_becomes_lm_eval_questions(tmp_path, name):
    path, expected = PUBLISHED[name](tmp_path)
    assert read_questions(name, path) == expected


def test_lambada_reads_json_lines(tmp_path):
    path = lines(tmp_path / "lambada.jsonl", {"text": "A sea.\n\nIt was his boat"})
    assert read_questions("lambada", path) == [Question([("A sea.\n\nIt was his", " boat")], 0)]


WRONG = {
    "hellaswag": ({"ctx": "a", "endings": ["b"], "label": 0}, "no list of endings"),
    "arc_easy": ({"question": {"stem": "a", "choices": [{"text": "b", "label": "A"}]}}, "no answer"),
    "arc_challenge": ({"question": "a"}, "no question with choices"),
    "piqa": ({"goal": "a", "sol1": "b", "sol2": "c"}, "no answer"),
    "winogrande": ({"sentence": "a _", "option1": "b", "option2": "c"}, "must have a _"),
    "lambada": ({"text": "word"}, "two words"),
}


@pytest.mark.parametrize("name, example, message", [
    *((name, *wrong) for name, wrong in WRONG.items()),
    *(("piqa", {"goal": text, "sol1": "b", "sol2": "c", "answer": 0}, "goal") for text in ("", " ", 5, None)),
    *(("piqa", {"goal": "a", "sol1": "b", "sol2": "c", "answer": at}, "of 0, 1") for at in (2, True, 0.0, "A")),
])  # fmt: skip
def test_invalid_question_names_its_line(tmp_path, name, example, message):
    path = PUBLISHED[name](tmp_path)[0]
    with path.open("a") as file:
        file.write(f"\n{json.dumps(example)}\n")
    with pytest.raises(DataError, match=rf"{path}, line \d: .*{message}"):
        read_questions(name, path)


@pytest.mark.parametrize("name", LINES)
def test_empty_or_invalid_file_is_rejected(tmp_path, name):
    path = tmp_path / "file"
    for text, message in (('{"text": ', "line 1: not a JSON"), ("\n", "has no questions")):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            read_questions(name, path)


def test_mismatched_labels_and_directories_are_rejected(tmp_path):
    path = piqa(tmp_path)[0]
    (tmp_path / "valid-labels.lst").write_text("0\n1\n1\n")
    with pytest.raises(DataError, match="more answers than"):
        read_questions("piqa", path)
    with pytest.raises(DataError, match="no files test/SUBJECT"):
        read_questions("mmlu", tmp_path)
    folder = mmlu(tmp_path / "mmlu")[0]
    rows(folder / "test" / "law_test.csv", ["Q", "a", "b", "c", "d", "E"])
    with pytest.raises(DataError, match=r"law_test.csv, line 1: a row must be"):
        read_questions("mmlu", folder)
    (folder / "dev" / "law_dev.csv").unlink()
    with pytest.raises(DataError, match=r"cannot read .*law_dev.csv"):
        read_questions("mmlu", folder)


def model(config=CONFIG, dtype="float64"):
    made = Model(Architecture(config), CpuKernels(dtype, 1))
    made.initialise(1)
    return made


def plain(gpt, span):
    """Return a span's summed loss and whether greedy decoding gives it, from all logits."""
    logits = gpt.logits(span.ids[None, :-1])[0].astype(float)
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(logits)), span.ids[1:]]
    behind = slice(span.first - 1, None)
    return losses[behind].sum(), (logits.argmax(1) == span.ids[1:])[behind].all()


def random_spans(gpt):
    """Make spans that share prefixes; one in four is the greedy continuation."""
    draw, spans = np.random.default_rng(3), []
    for i in range(24):
        ids = draw.integers(0, 256, 2 + 3 * i % 37)
        if i % 4 == 0:
            ids[-1] = gpt.logits(ids[None, :-1])[0, -1].argmax()
        spans += [Span(np.append(ids[:-1], last), len(ids) - 1) for last in (ids[-1], i, 7)]
        spans.append(Span(ids, 1 + i % (len(ids) - 1)))
    return spans


def test_likelihoods_match_logits_on_any_rank_count(monkeypatch):
    gpt = distgpt.init(CONFIG, seed=1, dtype="float64")
    spans = random_spans(gpt)
    expected = np.array([plain(gpt, span) for span in spans], float)
    assert 4 < expected[:, 1].sum() < len(spans)
    monkeypatch.setattr("distgpt.core.train.assessment.AT_A_TIME", 300)
    monkeypatch.setattr("distgpt.inference.evaluation.benchmark.AT_ONCE", 5)
    seen = []
    found = likelihoods(Scorer(model(), SerialComm()), spans, lambda done, tokens: seen.append((done, tokens)))
    np.testing.assert_allclose(found, expected, rtol=1e-10)
    assert seen[-1][0] == len(spans) and sum(tokens for _, tokens in seen) == sum(s.count for s in spans)
    for other in on_all_ranks(3, lambda comm: likelihoods(Scorer(model(), comm), spans)):
        np.testing.assert_array_equal(other, found)


def test_accuracy_uses_sum_or_mean_per_character():
    texts = ["a", "a longer one", "yes", "nobody knows that at all"]
    losses = [plain(GPT, span)[0] for span in Benchmark([asked(texts, 0)], BYTES, 700).spans]
    by_sum = int(np.argmin(losses))
    by_character = int(np.argmin([loss / len(text) for loss, text in zip(losses, texts, strict=True)]))
    assert by_sum != by_character
    result = Benchmark([asked(texts, by_sum), asked(texts, by_sum), asked(texts, by_character)], BYTES, 700)
    found = result.measure(Scorer(model(), SerialComm()))
    assert (found["acc"], found["acc_norm"], found["examples"]) == (2 / 3, 1 / 3, 3)


GPT = distgpt.init(CONFIG, seed=1, dtype="float64")


def asked(texts, right):
    return Question([("Question: which?\nAnswer:", f" {text}") for text in texts], right)


def test_greedy_word_counts_as_correct():
    """The tokenizer's second word is the model's most likely word after the first."""
    kinds = ["the", "zebra", *(f"word{i}" for i in range(14))]
    tokenizer = load_tokenizer("word", " ".join(kinds))
    gpt = distgpt.init(replace(CONFIG, vocab_size=tokenizer.size), seed=1, dtype="float64")
    start = tokenizer.encode_prompt("the")
    topk_logits = tokenizer.decode([int(gpt.logits(np.array([start]))[0, -1].argmax())])
    others = [kind for kind in kinds if kind != topk_logits.strip()]
    words = [topk_logits.strip(), *others[:2]]
    benchmark = Benchmark([Question([("the", f" {word}")], 0) for word in words], tokenizer, 700)
    expected = [plain(gpt, span) for span in benchmark.spans]
    found = benchmark.measure(Scorer(model(config=gpt.config), SerialComm()))
    assert found["acc"] == pytest.approx(1 / 3) == np.mean([greedy for _, greedy in expected])
    assert found["perplexity"] == pytest.approx(np.exp(np.mean([loss for loss, _ in expected])))


def test_spans_score_only_the_answer():
    spans = Benchmark([asked(["one", "twelve"], 0)], BYTES, 700).spans
    assert [bytes(span.ids[span.first :].astype(np.uint8)) for span in spans] == [b" one", b" twelve"]
    short = Benchmark([asked(["one", "twelve"], 0)], BYTES, 5).spans
    assert [bytes(span.ids.astype(np.uint8)) for span in short] == [b"r: one", b"twelve"]
    assert [span.first for span in short] == [2, 1]
    blank = Benchmark([Question([("a ", " b")], 0)], BYTES, 5).spans[0]
    assert bytes(blank.ids[blank.first :].astype(np.uint8)) == b"  b"
    with pytest.raises(DataError, match=r"question 1: .*has no tokens"):
        Benchmark([Question([("", " b")], 0)], BYTES, 5)


MODEL = shape(256, 700, 2, 6, 36, n_kv_head=2, norm="rmsnorm", mlp="swiglu", positions="rope", bias=False)


def test_eval_command_runs_every_benchmark(tmp_path, capsys):
    exported_model(tmp_path / "model", MODEL)
    words, counts = ["eval", "--weights", tmp_path / "ours.safetensors", "--threads", 1], {}
    for name, write in PUBLISHED.items():
        (tmp_path / name).mkdir()
        path, questions = write(tmp_path / name)
        words += [f"--{name.replace('_', '-')}", path]
        counts[f"{name}_examples"] = len(questions)
    cli.main([*map(str, words), "--json"], standalone_mode=False)
    found = json.loads(capsys.readouterr().out)
    assert {key: value for key, value in found.items() if key.endswith("_examples")} == counts
    for name in PUBLISHED:
        assert 0 <= found[f"{name}_acc"] <= 1
        assert (f"{name}_acc_norm" in found) == (name in ("hellaswag", "arc_easy", "arc_challenge", "piqa"))
        assert (f"{name}_perplexity" in found) == (name == "lambada")
    assert PUBLISHED.keys() == BENCHMARKS.keys() and set(found["mmlu_subjects"]) == {"high_school_art", "law"}
    cli.main(list(map(str, words)), standalone_mode=False)
    said = capsys.readouterr().out
    assert all(f"{name} " in said for name in PUBLISHED)
    with pytest.raises(DistgptError, match=r"cannot read .*none.jsonl"):
        cli.main(["eval", "--weights", str(words[2]), "--piqa", str(tmp_path / "none.jsonl")], standalone_mode=False)


@pytest.mark.peer
def test_likelihoods_match_transformers(tmp_path):
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    exported_model(tmp_path / "model", MODEL)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    ours, _ = load_model(tmp_path / "ours.safetensors", CpuKernels("float32", 1), SerialComm())
    for name, write in PUBLISHED.items():
        (tmp_path / name).mkdir()
        benchmark = Benchmark(read_questions(name, write(tmp_path / name)[0]), BYTES, 700)
        found = likelihoods(Scorer(ours, SerialComm()), benchmark.spans)
        for (loss, greedy), span in zip(found, benchmark.spans, strict=True):
            ids = torch.tensor(span.ids[None].astype(np.int64))
            with torch.no_grad():
                logits = theirs(ids).logits[0, span.first - 1 : -1]
            likely = torch.log_softmax(logits.double(), -1)
            expected = -likely.gather(1, ids[0, span.first :, None]).sum()
            assert abs(loss - float(expected)) < 1e-4, (name, loss, expected)
            assert greedy == bool((logits.argmax(-1) == ids[0, span.first :]).all())


SMALL = ModelConfig(vocab_size=61, seq_len=48, n_layer=2, n_head=2, n_embd=16)
RANDOM = np.random.default_rng(0)
IDS = RANDOM.integers(0, 61, 2000).astype(np.uint16)
LENGTHS = [2, 49, 7, 33, 34, 12, 49, 3, 20, 48]
SPANS = [Span(IDS[i * 50 :][:length], 1 + i % (length - 1)) for i, length in enumerate(LENGTHS)]


def plain_sum(span):
    return plain(distgpt.init(SMALL, seed=1, dtype="float64"), span)[0]


def test_span_sums_do_not_depend_on_batching(monkeypatch):
    expected = [plain_sum(span) for span in SPANS]
    for together in (assessment.AT_A_TIME, 1):
        monkeypatch.setattr(assessment, "AT_A_TIME", together)
        sums = Scorer(model(SMALL), SerialComm()).sums(SPANS)
        np.testing.assert_allclose(sums, expected, rtol=1e-10, err_msg=f"{together} tokens at a time")


def test_span_sums_are_bitwise_equal_on_any_rank_count(monkeypatch):
    monkeypatch.setattr("distgpt.core.train.assessment.AT_A_TIME", 100)  # several batches
    many = [Span(IDS[i : i + 2 + i % 47]) for i in range(0, 1900, 7)]
    for dtype in ("float32", "float64"):
        expected = Scorer(model(SMALL, dtype), SerialComm()).sums(many)
        for sums in on_all_ranks(3, lambda comm, dtype=dtype: Scorer(model(SMALL, dtype), comm).sums(many)):
            np.testing.assert_array_equal(sums, expected, dtype)


def test_validation_predicts_every_token_once():
    for most, count in ((0, 1999), (100, 100), (1, 1), (5000, 1999)):
        validation = Validation(windows_of(ArrayTokens(IDS), 48, most))
        predicted = np.concatenate([span.ids[1:] for span in validation.spans])
        np.testing.assert_array_equal(predicted, IDS[1 : count + 1])
        loss = validation.measure(Scorer(model(SMALL), SerialComm()))
        assert validation.count == count and 3 < loss < 6
        expected = sum(plain_sum(span) for span in validation.spans[:3])
        assert Scorer(model(SMALL), SerialComm()).sums(validation.spans[:3]).sum() == pytest.approx(expected)


def test_bits_per_byte_counts_predicted_text():
    wide = "a é€😀 b, é€😀 a."
    for kind, text in (("byte", wide), ("char", wide), ("word", "a cat, a dog.")):
        tokenizer = load_tokenizer(kind, text)
        for window in (1, 2, 3, 7):
            validation = Validation(windows_of(ArrayTokens(tokenizer.encode(text)), window))
            size = validation.count / validation.bits_per_byte(math.log(2), tokenizer)
            assert size == pytest.approx(len(text[1:].encode())), (kind, window)
    ids = np.array([60, 97, 98, 60, 99], np.uint16)
    tokenizer = load_tokenizer("byte", "")
    tokenizer.separator = 60  # has no text
    assert Validation(windows_of(ArrayTokens(ids), 2)).bits_per_byte(math.log(2), tokenizer) == pytest.approx(4 / 3)
    assert Validation(windows_of(ArrayTokens(ids[[0, 3]]), 2)).bits_per_byte(1.0, tokenizer) is None


def test_evaluation_counts_bits_per_byte(capsys):
    sample = bundled("weights", "sample.safetensors")
    tokenizer = read_description(sample).tokenizer
    ids = tokenizer.encode(read_text(resolve_data("story")))[:301]
    length = len(tokenizer.decode(ids).encode()) - len(tokenizer.decode(ids[:1]).encode())
    found = evaluate(open_stage("serial", 1), sample, "story", val_tokens=300)
    assert found["val_tokens"] == 300 and 0.5 < found["val_loss"] * 300 / length < 5  # per byte
    assert found["perplexity"] == pytest.approx(2.718281828 ** found["val_loss"])
    assert found["bits_per_byte"] == pytest.approx(found["val_loss"] / 0.693147181 * 300 / length)
    words = f"eval --weights {sample} --val story --val-tokens 300 --threads 1 --json"
    cli.main(words.split(), standalone_mode=False)
    assert json.loads(capsys.readouterr().out) == found
    with pytest.raises(UsageError, match="nothing to evaluate; pass --val, or a benchmark"):
        cli.main(["eval", "--weights", "any"], standalone_mode=False)


CORE_CONFIG = ModelConfig(vocab_size=256, seq_len=200, n_layer=1, n_head=2, n_embd=32)
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
    gpt = distgpt.init(CORE_CONFIG, seed=4, dtype="float64")
    model = Model(Architecture(CORE_CONFIG), CpuKernels("float64", 1))
    model.initialise(4)
    result = Core(SerialComm(), bundle, BYTES, CORE_CONFIG.seq_len).measure(Scorer(model, SerialComm()))
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
