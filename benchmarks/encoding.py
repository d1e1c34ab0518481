"""How fast GPT-2's BPE encodes: distgpt, the `tokenizers` library and tiktoken in turns, one thread each.

    python benchmarks/encoding.py --peer PEER/bin/python --gpt2 FOLDER [--texts FILE...]

FOLDER has GPT-2's vocab.json and merges.txt; the peer's environment has tiktoken (requirements-peer.txt).
Each side runs in a process of its own and encodes the same documents one after the other. Cold is the first
time in a new encoder, which has seen none of the text; warm is the median of the times after that. Without
--texts, there are two: "bundled", all of data/*.txt end to end, and "code", distgpt's own source files.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve()
SIDES = ("distgpt", "tokenizers", "tiktoken")
DOCUMENT = 8192  # characters, up to the next line break
REPEATS = 5
SPLIT = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

Encode = Callable[[Sequence[str]], Iterable[Any]]  # the ids of each document


def main() -> None:
    from record import arguments, save

    args = arguments(
        __doc__,
        peer={"type": Path, "required": True, "help": "Python of the environment with tiktoken"},
        gpt2={"type": Path, "required": True, "help": "folder with vocab.json and merges.txt"},
        texts={"type": Path, "nargs": "+", "help": "files in UTF-8"},
    )
    with tempfile.TemporaryDirectory() as scratch:
        texts = args.texts or default_texts(Path(scratch))
        rows = {text.name: compare(args.peer, args.gpt2, text, args.rounds) for text in texts}
    save("encoding", {"texts": rows}, args.out)


def default_texts(scratch: Path) -> list[Path]:
    """What everybody has who has the sources."""
    root = HERE.parents[1]
    texts = {"bundled": (root / "data").glob("*.txt"), "code": (root / "distgpt").rglob("*.py")}
    for name, files in texts.items():
        (scratch / name).write_bytes(b"".join(file.read_bytes() for file in sorted(files)))
    return [scratch / name for name in texts]


def compare(peer: Path, gpt2: Path, text: Path, rounds: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for _ in range(rounds):
        for side in SIDES:
            python = peer if side == "tiktoken" else Path(sys.executable)
            runs[side].append(in_own_process(python, side, gpt2, text))
    outcomes = {(run["tokens"], run["crc32"]) for of_side in runs.values() for run in of_side}
    if len(outcomes) > 1:
        raise SystemExit(f"{text}: the sides do not give the same ids: {outcomes}")
    size, tokens = text.stat().st_size, runs["distgpt"][0]["tokens"]
    row = {"bytes": size, "sha256": hashlib.sha256(text.read_bytes()).hexdigest(), "tokens": tokens}
    print(f"{text.name}: {size / 1e6:.1f} MB, {tokens:,} tokens")
    for state in ("cold", "warm"):
        speed = {side: [tokens / run[f"{state}_s"] for run in runs[side]] for side in SIDES}
        medians = {side: median(speed[side]) for side in SIDES}
        pairs = {side: zip(speed["distgpt"], speed[side], strict=True) for side in SIDES[1:]}
        ratios = {side: median(a / b for a, b in each) for side, each in pairs.items()}
        row |= {f"{state}_tokens_per_s": medians, f"{state}_ratio": ratios}
        shown = ", ".join(f"{side} {rate / 1e6:.2f}" for side, rate in medians.items())
        faster = ", ".join(f"{ratio:.1f} × {side}" for side, ratio in ratios.items())
        print(f"  {state}: {shown} million tokens/s; distgpt is {faster}", flush=True)
    return row | {"runs": runs}


def in_own_process(python: Path, side: str, gpt2: Path, text: Path) -> dict[str, Any]:
    from distgpt.cluster.jobs.processes import run
    from distgpt.measure.jobs import answer

    env = {key: value for key, value in os.environ.items() if not key.startswith(("RAYON_", "NUMBA_"))}
    command = [python, HERE, side, gpt2.resolve(), text.resolve()]
    return answer(run(command, env={**env, "RAYON_NUM_THREADS": "1"}, cwd=Path(tempfile.gettempdir())), side)


def measure(side: str, gpt2: Path, text: Path) -> dict[str, Any]:
    documents = documents_of(text.read_text("utf-8"))
    begun = time.perf_counter()
    sides = {"distgpt": distgpt, "tokenizers": tokenizers, "tiktoken": tiktoken}
    make: Callable[[], Encode] = sides[side](gpt2)
    list(make()(["Hello, world! " * 50000]))  # whatever is loaded or compiled at first use
    started, encode, times = time.perf_counter() - begun, make(), []
    for _ in range(1 + REPEATS):
        begun = time.perf_counter()
        ids = encode(documents)
        times.append(time.perf_counter() - begun)
    plain = [[int(i) for i in document] for document in ids]
    return {
        "version": version(side),
        "start_s": started,
        "cold_s": times[0],
        "warm_s": median(times[1:]),
        "tokens": sum(map(len, plain)),
        "crc32": zlib.crc32(json.dumps(plain).encode()),
    }


def documents_of(text: str) -> list[str]:
    documents, start = [], 0
    while start < len(text):
        stop = text.find("\n", start + DOCUMENT) + 1 or len(text)
        documents.append(text[start:stop])
        start = stop
    return documents


def distgpt(gpt2: Path) -> Callable[[], Encode]:
    from distgpt.core.data.tokenizers import load_tokenizer

    def make() -> Encode:
        tokenizer = load_tokenizer(str(gpt2))
        tokenizer.encode(" " * (1 << 19))  # beyond this size the compiled loops take over
        return lambda documents: [tokenizer.encode(document) for document in documents]

    return make


def tokenizers(gpt2: Path) -> Callable[[], Encode]:
    from tokenizers import Tokenizer, models, pre_tokenizers

    def make() -> Encode:
        library = Tokenizer(models.BPE.from_file(str(gpt2 / "vocab.json"), str(gpt2 / "merges.txt")))
        library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return lambda documents: [encoding.ids for encoding in library.encode_batch_fast(documents)]

    return make


def tiktoken(gpt2: Path) -> Callable[[], Encode]:
    import tiktoken

    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    vocab = json.loads((gpt2 / "vocab.json").read_text("utf-8"))
    separator = vocab.pop("<|endoftext|>")
    ranks = {bytes(byte_of[symbol] for symbol in entry): i for entry, i in vocab.items()}

    def make() -> Encode:
        encoding = tiktoken.Encoding(
            "gpt2", pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": separator}
        )
        return lambda documents: [encoding.encode_ordinary(document) for document in documents]

    return make


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in SIDES:  # as one side's process
        print(json.dumps(measure(sys.argv[1], *map(Path, sys.argv[2:]))))
    else:
        main()
