"""Run shell commands of documents in a scratch directory: python tests/documents/run.py [FILE.md…]

A comment before a block changes how it is run:

  <!-- not run: WHY -->
  <!-- run with: train --steps 5; infer --max-new-tokens 9 -->     appended to each such command of distgpt

A ```text block after it shows printed lines in order. Numbers, times and paths may differ, words must not;
… replaces omitted text. The scratch directory has my.txt, held-out.txt, the directory texts/, and model.gguf, a small
random Llama with a tokenizer and a chat template like SmolLM2's.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PROGRAM = (sys.executable, "-m", "distgpt")
DOCUMENTS = (ROOT / "README.md", *sorted((ROOT / "docs" / "tutorials").glob("*.md")))
BLOCK = re.compile(r"(?:<!-- (not run|run with): (.*?) -->\n)?```(?:bash|sh)\n(.*?)```", re.DOTALL)
SHOWN = re.compile(r"[^`]*```text\n(.*?)```", re.DOTALL)
# Patterns of text that may differ between a document and a run, and their replacement.
LOOSE = (
    (re.compile(r"(?<!\S)(?:\.{0,2}/|~|runs/)\S+"), "/"),
    (re.compile(r"[-+]?\d[\d,.:]*(?:e[-+]?\d+)?"), "0"),
    (re.compile(r"0 ?(?:[mµ]?s|min|h|[kMGT]?B|[KMGT]iB)\b"), "0"),
    (re.compile(r"\s+"), " "),
)

# Precedes the real program on the PATH, and appends the words of a comment.
WRAPPER = """#!/bin/sh
name=$(echo "$1" | tr a-z- A-Z_)
eval "more=\\$MORE_$name"
exec {program} "$@" $more
"""


class Block(NamedTuple):
    """A shell block: the line of its first command, its commands, and words to append."""

    line: int
    script: str
    skipped: str  # why, if it is
    more: dict[str, str]
    shown: str = ""  # lines that it prints


class Failed(Exception):
    """A block that did not end with 0."""


def blocks(text: str) -> Iterator[Block]:
    for found in BLOCK.finditer(text):
        how, what, script = found.groups()
        pairs = [part.strip().partition(" ") for part in what.split(";")] if how == "run with" else []
        more = {f"MORE_{name.upper().replace('-', '_')}": words for name, _, words in pairs}
        line = text.count("\n", 0, found.start(3)) + 1
        shown = SHOWN.match(text, found.end())
        yield Block(line, script, what if how == "not run" else "", more, shown[1] if shown else "")


def loose(line: str) -> str:
    for pattern, by in LOOSE:
        line = pattern.sub(by, line)
    return line.strip()


def not_printed(shown: str, printed: str) -> str:
    rest = iter([loose(line) for line in printed.splitlines()])
    for line in shown.splitlines():
        begin, cut, _ = loose(line).partition("…")
        if begin and not any(other.startswith(begin) if cut else other == begin for other in rest):
            return line
    return ""


def prepare(scratch: Path, called: Sequence[str]) -> dict[str, str]:
    program = scratch / ".bin" / "distgpt"
    program.parent.mkdir()
    program.write_text(WRAPPER.format(program=shlex.join(called)))
    program.chmod(0o755)
    corpus = (ROOT / "data" / "corpus.txt").read_bytes()
    (scratch / "my.txt").write_bytes(corpus)
    (scratch / "held-out.txt").write_bytes(corpus[:5000])
    (scratch / "texts").mkdir()
    for number in range(8):
        (scratch / "texts" / f"{number}.txt").write_bytes(corpus[number * 9000 : (number + 1) * 9000])
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "helpers")]
    from distgpt.models.formats.gguf.transfer import export_gguf
    from gguffiles import tokenizer_like, with_tokenizer

    (scratch / "model.gguf").unlink(missing_ok=True)
    weights = with_tokenizer(scratch / "w.safetensors", tokenizer_like("smollm2"), seq_len=256)
    export_gguf(weights, scratch / "model.gguf", "q8_0")
    weights.unlink()
    path = os.pathsep.join([str(program.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    own = {"PATH": path, "PYTHONPATH": str(ROOT), "COLUMNS": "100", "XDG_CACHE_HOME": str(scratch / ".cache")}
    return {**os.environ, **own, "DISTGPT_AUTO_DTYPE": "float32"}  # the pages' losses


def run(document: Path, scratch: Path, called: Sequence[str] = PROGRAM) -> None:
    """Run a document's blocks in separate shells until one fails.

    `called` is the command for `distgpt`.
    """
    environment = prepare(scratch, called)
    for block in blocks(document.read_text()):
        where = f"{document.name}:{block.line}"
        if block.skipped:
            print(f"{where}: not run: {block.skipped}", flush=True)
            continue
        begun = time.monotonic()
        result = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block.script], cwd=scratch, env={**environment, **block.more},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        if result.returncode:
            raise Failed(f"{where}: left with {result.returncode}\n{block.script}{result.stdout[-2000:]}")
        if line := not_printed(block.shown, result.stdout):
            raise Failed(f"{where}: no longer prints\n{line}\n but\n{result.stdout[-4000:]}")
        print(f"{where}: {time.monotonic() - begun:.1f} s", flush=True)


def main(documents: list[Path], called: Sequence[str] = PROGRAM) -> int:
    for document in documents:
        scratch = Path(tempfile.mkdtemp(prefix="distgpt-documents-"))
        try:
            run(document, scratch, called)
        except Failed as failed:
            print(failed, file=sys.stderr)
            return 1
        finally:
            shutil.rmtree(scratch)
    return 0


if __name__ == "__main__":
    sys.exit(main([Path(word) for word in sys.argv[1:]] or list(DOCUMENTS)))
