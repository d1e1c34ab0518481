"""Fuzz targets: directories of good files, the files to corrupt, and the commands that read them."""

import gzip
import json
import shutil
import sys
from functools import partial
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "helpers")]

from distgpt.core.base.files import bundled
from distgpt.corpora.prepare.preparing import Progress

from conftest import SMALL, inside

KINDS = ("bpe", "char", "word")
HARBOUR = "The harbour lamp was lit, and the boats came home. "
CUT = "--tokenizer byte --shard-tokens 1000 --workers 1 --progress plain"
EVALUATED = "--save-every 3 --eval-every 3 --val-fraction 0.05 --progress plain"
RESUME = f"train {' '.join(SMALL)} --out {{}}/run --resume auto --steps 7 {EVALUATED}"

SUFFIXES = {".npy": "bytes", ".gz": "bytes", ".parquet": "bytes"}
SUFFIXES |= dict.fromkeys((".txt", ".lst", ".csv", ".tsv", ".md"), "text")


class Target:
    """`make` fills a directory; `files` are corrupted by kind (mutate.KINDS); `{}` in a command is the directory."""

    def __init__(self, make, files, *commands):
        self.make, self.commands = make, list(commands)
        self.damage = {name: SUFFIXES.get(Path(name).suffix, Path(name).suffix[1:]) for name in files.split()}


def run(*words):
    done = inside(*(str(word) for word in words))
    assert done.returncode == 0, (words, done.stderr)


def small_run(folder):
    run("train", *SMALL, "--out", folder / "run", "--steps", 6, *EVALUATED.split())


def keep_weights(folder, name):
    shutil.copy(folder / "run" / "weights.safetensors", folder / name)
    shutil.rmtree(folder / "run")


def weights(folder):
    small_run(folder)
    keep_weights(folder, "w.safetensors")


def rounded_weights(folder, dtype):
    weights(folder)
    run("weights", "quantize", folder / "w.safetensors", "--dtype", dtype, "--out", folder / "q.safetensors")
    (folder / "w.safetensors").unlink()


def adapter(folder):
    weights(folder)
    words = "--data story --threads 1 --batch-size 8 --seq-len 16 --steps 3 --lora-rank 2 --progress plain"
    run("train", "--init", folder / "w.safetensors", *words.split(), "--out", folder / "run")
    keep_weights(folder, "a.safetensors")


def published_adapter(folder):
    adapter(folder)
    run("weights", "export", folder / "a.safetensors", "--out", folder / "peft")
    (folder / "a.safetensors").unlink()


def published(folder):
    run("train", *SMALL, "--tokenizer", "byte", "--out", folder / "run", "--steps", 1, "--progress", "plain")
    run("weights", "export", folder / "run" / "weights.safetensors", "--out", folder / "hf")
    shutil.rmtree(folder / "run")


def shards(folder):
    (folder / "text.txt").write_text(HARBOUR * 60)
    run("data", "prepare", folder / "text.txt", *CUT.split(), "--out", folder / "shards")


def unfinished_shards(folder):
    """Leave a spool and a progress file, like an interruption."""
    (folder / "text.txt").write_text(HARBOUR * 60)
    save = Progress.save

    def stop(progress, place):
        save(progress, place)
        if progress.begun:
            raise KeyboardInterrupt

    Progress.save = stop
    try:
        inside("data", "prepare", folder / "text.txt", *CUT.split(), "--out", folder / "shards")
    finally:
        Progress.save = save
    assert (folder / "shards" / "progress.json").exists()


def tokenizers(folder):
    (folder / "text.txt").write_text("low lower lowest new newer newest wide wider widest\n" * 20)
    for kind in KINDS:
        size = ["--vocab-size", "270"] if kind == "bpe" else []
        run("tokenizer", "train", folder / "text.txt", "--kind", kind, *size, "--out", folder / f"{kind}.json")


def foreign_tokenizers(folder):
    tokenizers(folder)
    from tokenizers import ByteLevelBPETokenizer

    learned = ByteLevelBPETokenizer()
    learned.train([str(folder / "text.txt")], vocab_size=280, show_progress=False, special_tokens=["<|endoftext|>"])
    (folder / "gpt2").mkdir()
    learned.save_model(str(folder / "gpt2"))
    (folder / "hf").mkdir()
    learned.save(str(folder / "hf" / "tokenizer.json"))


def chatting_model(folder):
    """Write a model of transformers with another family's tokenizer and a chat template."""
    from chattemplates import settings
    from families import write_family
    from foreignmodels import MODERN, exported_model, shape

    exported_model(folder / "hf", shape(1000, 128, 1, 2, 16, **MODERN), tokenizer=None)
    (folder / "ours.safetensors").unlink()
    write_family(folder / "hf", "llama3", **settings("llama3"))


def in_gguf(family, dtype, in_blocks=False):
    def make(folder):
        from gguffiles import tokenizer_like, with_tokenizer

        path = with_tokenizer(folder / "w.safetensors", tokenizer_like(family))
        run("weights", "export", path, "--out", folder / "m.gguf", "--dtype", dtype)
        path.unlink()
        if in_blocks:
            run("weights", "import", folder / "m.gguf", "--out", path)

    if in_blocks:
        read = "infer --weights {}/w.safetensors --max-new-tokens 3 --threads 1"
        return Target(make, "w.safetensors", "weights info {}/w.safetensors --json", read)
    return Target(make, "m.gguf", "weights import {}/m.gguf --out {}/o.safetensors", "weights info {}/m.gguf --json")


def documents(folder):
    texts = [f"Document {i} tells of the harbour and its lamps." for i in range(30)]
    lines = "".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(texts))
    (folder / "a.jsonl").write_text(lines)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(lines.encode(), mtime=0))
    (folder / "c.txt").write_text("\n".join(texts))


def chats(folder):
    shape = ("--tokenizer", "byte", "--seq-len", 64)
    run("train", *SMALL, *shape, "--out", folder / "run", "--steps", 1, "--progress", "plain")
    turns = [{"role": role, "content": "Lamps."} for role in ("system", "user", "assistant")]
    shareds = [{"from": role, "value": "Lamps."} for role in ("human", "gpt")]
    rows = [{"messages": turns}, {"conversations": shareds}, {"prompt": "a", "completion": "b"}, {"text": "c"}]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in 3 * rows))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes(), mtime=0))


def tables_of_chats(folder):
    chats(folder)
    rows = [json.loads(line) for line in (folder / "a.jsonl").read_text().splitlines()]
    for name, text in {
        "d/l.json": json.dumps(rows, indent=1),
        "d/c.csv": "question,answer\n" + 'Who?,"Marta, and\n""Tom"""\n' * 5,
        "d/s.csv": "prompt;response;id\n" + "Who?;Marta;1\n" * 5,
        "d/t.tsv": "instruction\tinput\toutput\n" + "Who?\t\tMarta\n" * 5,
        "texts/t.md": "# Harbour\n\nThe lamp was lit.\n" * 5,
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def tables(folder):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"text": [f"Row {i} of the table." for i in range(50)], "n": list(range(50))})
    pyarrow.parquet.write_table(table, folder / "t.parquet")


ANSWER = "infer --prompts {}/q.jsonl --out {}/o.jsonl --max-new-tokens 2 --threads 1"


def asked_and_half_answered(folder):
    lines = [{"prompt": "Boats", "seed": 3, "temperature": 0.8}, {"prompt": "The", "stop": ["a"], "top_p": 1}]
    lines += [{"prompt": "naïve", "logprobs": 2, "top_k": 5, "repetition_penalty": 1.5}, {"prompt": " "}]
    (folder / "q.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(*ANSWER.replace("{}", str(folder)).split())
    written = (folder / "o.jsonl").read_bytes()
    (folder / "o.jsonl").write_bytes(written[: len(written) * 2 // 3])


def config(folder):
    from distgpt.core.config.presets import preset

    (folder / "c.toml").write_text(preset("tiny").to_toml())


SWEEP = "sweep {}/grid.toml --out {}/s --threads 1"


def swept(folder):
    settings = 'preset = "tiny-adamw"\ndata = "story"\ntokenizer = "word"\nval_fraction = 0.1\nsteps = 2'
    size = "n_layer = 1\nn_head = 2\nn_embd = 16\nseq_len = 8\nbatch_size = 2"
    (folder / "grid.toml").write_text(f"{settings}\n{size}\n[sweep]\nlr = [0.1, 0.01]\nrungs = 2\neta = 2")
    run(*SWEEP.format(folder, folder).split())


EVALUATE = (
    "eval --weights {}/w.safetensors --hellaswag {}/h.jsonl --arc-easy {}/arc.jsonl --piqa {}/p.jsonl "
    "--winogrande {}/w.jsonl --lambada {}/l.txt --mmlu {} --threads 1 --json"
)


def benchmarks(folder):
    shutil.copy(bundled("weights", "sample.safetensors"), folder / "w.safetensors")
    story = "harbour lamp"
    choices = [{"text": story, "label": label} for label in "ABC"]
    for name, line in {
        "h": {"activity_label": story, "ctx_a": story, "ctx_b": "the", "endings": ["a", story], "label": "1"},
        "arc": {"question": {"stem": story, "choices": choices}, "answerKey": "C"},
        "p": {"goal": story, "sol1": "the", "sol2": story},
        "w": {"sentence": "the _ harbour", "option1": "a", "option2": "lamp", "answer": "2"},
    }.items():
        (folder / f"{name}.jsonl").write_text(f"{json.dumps(line)}\n" * 3)
    (folder / "p-labels.lst").write_text("0\n1\n0\n")
    (folder / "l.txt").write_text("the harbour and the lamp\nthe lamp\n")
    for part in ("dev", "test"):
        (folder / part).mkdir()
        (folder / part / f"law_{part}.csv").write_text('"the, harbour",a,the,lamp,and,B\n' * 3)


TRAINED = "train --n-layer 1 --n-head 1 --n-embd 16 --seq-len 16 --batch-size 2 --steps 1 --threads 1 "
ROUNDED = "infer --weights {}/q.safetensors --max-new-tokens 3 --threads 1"
INFER = "infer --weights {}/w.safetensors --max-new-tokens 3 --threads 1"
STEP = "run/checkpoints/step-00000006"
TARGETS = {
    "weights": Target(
        weights, "w.safetensors", "weights info {}/w.safetensors", "weights info {}/w.safetensors --json",
        "eval --weights {}/w.safetensors --val story --val-tokens 64 --threads 1 --json",
        "weights export {}/w.safetensors --out {}/hf", INFER, f"{INFER} --temperature 1 --json",
    ),
    **{dtype: Target(
        partial(rounded_weights, dtype=dtype), "q.safetensors", "weights info {}/q.safetensors --json",
        ROUNDED, f"{ROUNDED} --dtype float32",
    ) for dtype in ("int8", "int4")},
    "adapter": Target(
        adapter, "a.safetensors", "weights info {}/a.safetensors --json",
        "infer --weights {}/w.safetensors --adapter {}/a.safetensors --max-new-tokens 3 --threads 1",
        "weights merge --adapter {}/a.safetensors --weights {}/w.safetensors --out {}/m.safetensors",
        "weights export {}/a.safetensors --out {}/peft",
    ),
    "adapter of PEFT": Target(
        published_adapter, "peft/adapter_config.json peft/adapter_model.safetensors",
        "weights import {}/peft --weights {}/w.safetensors --out {}/o.safetensors",
    ),
    "published model": Target(
        published, "hf/config.json hf/model.safetensors",
        "weights import {}/hf --out {}/o.safetensors --tokenizer byte", "weights info {}/hf",
    ),
    "checkpoint": Target(
        small_run,
        f"{STEP}/state.json {STEP}/manifest.json {STEP}/optimizer.safetensors run/config.toml run/tokenizer.json "
        "run/metrics.jsonl run/summary.json",
        RESUME, "runs {}", "runs {} --json --sort speed", "plot {}/run --out {}/p.svg",
        "infer --weights {}/run --max-new-tokens 2 --threads 1",
    ),
    "shards": Target(
        shards, "shards/manifest.json shards/tokenizer.json shards/train-000000.npy", "data info {}/shards",
        "data info {}/shards --json --no-verify", TRAINED + "--data {}/shards --out {}/run --progress plain",
    ),
    "unfinished shards": Target(
        unfinished_shards, "shards/progress.json shards/tokenizer.json",
        f"data prepare {{}}/text.txt {CUT} --out {{}}/shards",
    ),
    "tokenizers": Target(
        tokenizers, "bpe.json char.json word.json", *(f"tokenizer info {{}}/{kind}.json" for kind in KINDS),
    ),
    "foreign tokenizers": Target(
        foreign_tokenizers, "gpt2/vocab.json gpt2/merges.txt hf/tokenizer.json",
        *(f"tokenizer info {{}}/{name} --text it's-12-naïve" for name in ("gpt2", "hf/tokenizer.json")),
    ),
    "chatting model": Target(
        chatting_model, "hf/tokenizer.json hf/tokenizer_config.json hf/generation_config.json",
        "tokenizer info {}/hf --text it's-12-naïve", "weights import {}/hf --out {}/o.safetensors",
        "weights info {}/hf --json",
    ),
    "gguf": in_gguf("qwen", "float32"),
    "gguf in four bits": in_gguf("llama3", "q4_0"),
    "gguf with pieces": in_gguf("tinyllama", "q8_0"),
    "weights in blocks": in_gguf("llama3", "q4_0", in_blocks=True),
    "configuration": Target(
        config, "c.toml", *(f"estimate --config {{}}/c.toml --no-measure {more}" for more in ("", "--json"))
    ),
    "sweep": Target(swept, "s/grid.json s/results/lr=0.1/result.json s/lr=0.1/metrics.jsonl", SWEEP),
    "documents": Target(
        documents, "a.jsonl b.jsonl.gz c.txt",
        f"data prepare {{}}/a.jsonl {{}}/b.jsonl.gz {{}}/c.txt {CUT} --out {{}}/o",
        "tokenizer train {}/a.jsonl {}/c.txt --kind char --out {}/t.json",
        TRAINED + "--data {}/a.jsonl --val {}/b.jsonl.gz --out {}/run --progress plain",
    ),
    "benchmarks": Target(
        benchmarks, "h.jsonl arc.jsonl p.jsonl p-labels.lst w.jsonl l.txt test/law_test.csv dev/law_dev.csv", EVALUATE
    ),
    "chats": Target(
        chats, "a.jsonl b.jsonl.gz",
        "tune --weights {}/run --data {}/a.jsonl --val {}/b.jsonl.gz --steps 1 --batch-size 2 "
        "--threads 1 --out {}/o --progress plain",
    ),
    "tables of chats": Target(
        tables_of_chats, "d/l.json d/c.csv d/s.csv d/t.tsv texts/t.md",
        *(f"eval --weights {{}}/run --val {{}}/{name} --chats --threads 1 --json" for name in ("d", "d", "d", "texts")),
    ),
    "tables": Target(tables, "t.parquet", f"data prepare {{}}/t.parquet {CUT} --out {{}}/o"),
    "prompts": Target(asked_and_half_answered, "q.jsonl o.jsonl", ANSWER),
}  # fmt: skip
