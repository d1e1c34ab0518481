"""The output of `distgpt data`: its progress, its result, and the contents of a folder of shards."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from distgpt.data.prepare.preparing import Request, Watcher, prepare
from distgpt.data.prepare.progress import is_unfinished
from distgpt.data.shards import (
    MANIFEST,
    SPLITS,
    Manifest,
    ShardTokens,
    is_shards,
    read_manifest,
    shards_tokenizer,
    unlisted,
    verify_shards,
)
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.errors import DataError, command_line, escape, print_lines
from distgpt.files import storage_errors
from distgpt.formatting import clock, count, size
from distgpt.show.display import Plain
from distgpt.show.tables import terminal_table

SECONDS_BETWEEN_LINES = 3.0
SAMPLE_TOKENS = 64
MOST_SOURCES = 12  # rows; more files than that are shown by folder


class Lines(Plain):
    """Progress as a line every few seconds."""

    def __init__(self, label: str) -> None:
        super().__init__(sys.stderr, SECONDS_BETWEEN_LINES)
        self._label = label
        self._total = 0
        self._begun: tuple[float, int, int] | None = None

    def began(self, total_bytes: int, of: str, label: str = "") -> None:
        self._total, self._begun = max(1, total_bytes), None
        self.say(f"{label or self._label} {size(total_bytes)} ({of})")
        self.is_due()  # not at once

    def advanced(self, consumed: int, tokens: int) -> None:
        pace = self._pace(consumed, tokens)
        if not self.is_due():
            return
        line = f"{consumed / self._total:4.0%}  {size(consumed)}  {tokens:,} tokens"
        if pace:
            line += f"  {pace[0]:,.0f} tokens/s  left {clock((self._total - consumed) / pace[1])}"
        self.say(line)

    def _pace(self, consumed: int, tokens: int) -> tuple[float, float] | None:
        """Return tokens and bytes a second since the first report: a resumed run does not begin at 0."""
        now = time.monotonic()
        begun, bytes_then, tokens_then = self._begun = self._begun or (now, consumed, tokens)
        if consumed == bytes_then or now == begun:
            return None
        return (tokens - tokens_then) / (now - begun), (consumed - bytes_then) / (now - begun)


class Live(Lines):
    """Progress as a bar with bytes, tokens and time left."""

    def __init__(self, label: str) -> None:
        super().__init__(label)
        console = Console(stderr=True, force_terminal=True, highlight=False)
        whole = Column(no_wrap=True)
        shown = [
            (78, BarColumn(bar_width=12)),
            (0, DownloadColumn(binary_units=True, table_column=whole)),
            (52, TextColumn("[cyan]{task.fields[tokens]}", table_column=whole)),
            (65, TextColumn("[green]{task.fields[rate]}", table_column=whole)),
            (0, TextColumn("left", table_column=whole)),
            (0, TimeRemainingColumn(compact=True, table_column=whole)),
        ]
        fitting = (column for least, column in shown if console.width >= least)
        self.progress = Progress(*fitting, console=console)  # no wider than the terminal, and never two lines
        self._task = self.progress.add_task(label, total=None, tokens="", rate="", visible=False)

    def began(self, total_bytes: int, of: str, label: str = "") -> None:
        super().began(total_bytes, of, label)
        self.progress.update(self._task, total=total_bytes, completed=0, visible=True)

    def advanced(self, consumed: int, tokens: int) -> None:
        pace = self._pace(consumed, tokens)
        rate = f"{pace[0]:,.0f}/s" if pace else ""
        self.progress.update(self._task, completed=consumed, tokens=f"{tokens:,} tokens", rate=rate)

    def say(self, text: str, style: str = "") -> None:
        self.progress.console.print(Text(text, style))


@contextmanager
def watcher(progress: str, label: str) -> Iterator[Watcher]:
    """`progress` is live, plain, or auto: live on a terminal."""
    if progress == "live" or (progress == "auto" and sys.stderr.isatty()):
        live = Live(label)
        with live.progress:
            yield live
    else:
        yield Lines(label)


def prepare_and_report(request: Request, progress: str) -> None:
    with watcher(progress, "tokenizing") as watching:
        manifest = prepare(request, watching)
    for line in summary(request.out, manifest, manifest.description):
        print_lines(line)
    print_lines(f"next: {command_line('train', '--data', request.out)}")


def summary(folder: Path, manifest: Manifest, tokenizer: str) -> list[str]:
    """Describe the shards in a few lines."""
    total = sum(shard.bytes for shard in manifest.shards)
    lines = [f"{folder}: {count(len(manifest.shards), 'shard')}, {size(total)}, {tokenizer}"]
    for split in SPLITS:
        shards, tokens = manifest.of(split), manifest.tokens(split)
        if shards:
            lines.append(f"  {split:<6}{tokens:>16,} tokens in {count(len(shards), 'shard')}")
    ids = sum(shard.tokens for shard in manifest.shards)
    lines.append(
        f"  from {count(len(manifest.inputs), 'file')}, {count(manifest.documents, 'document')},"
        f" {size(manifest.text_bytes)} of text: {manifest.text_bytes / ids:.2f} bytes per token"
    )
    if manifest.replaced:
        lines.append(f"  {manifest.replaced:,} × U+FFFD put in for what was not UTF-8")
    return [*lines, *_source_table(manifest)]


def _source_table(manifest: Manifest) -> list[str]:
    """Tabulate documents, tokens and share by source, the largest first."""
    if len(manifest.sources) < 2:
        return []
    in_all = max(1, sum(tokens for _, tokens in manifest.sources))
    rows = [
        [name, f"{documents:,}", f"{tokens:,}", f"{tokens / in_all:.1%}"]
        for name, documents, tokens in _sources(manifest)
    ]
    return ["", *terminal_table(["source", "documents", "tokens", "share"], rows).split("\n"), ""]


def _sources(manifest: Manifest) -> list[tuple[str, int, int]]:
    """Return the inputs, or their folders if there are many, with documents and tokens, the largest first."""
    names = [name for name, _ in manifest.inputs]
    if len(names) > MOST_SOURCES:
        names = [f"{name.split('/')[0]}/" if "/" in name else name for name in names]
    sums: dict[str, tuple[int, int]] = {}
    for name, (documents, tokens) in zip(map(escape, names), manifest.sources, strict=True):
        before = sums.get(name, (0, 0))
        sums[name] = before[0] + documents, before[1] + tokens
    rows = sorted(((name, *pair) for name, pair in sums.items()), key=lambda row: (-row[2], row[0]))
    if len(rows) <= MOST_SOURCES:
        return rows
    rest = rows[MOST_SOURCES - 1 :]
    others = f"{len(rest)} others", sum(row[1] for row in rest), sum(row[2] for row in rest)
    return [*rows[: MOST_SOURCES - 1], others]


def report(folder: Path, as_json: bool, verify: bool) -> None:
    """Print what a folder of shards holds, or raise what is wrong with it."""
    manifest = _manifest_in(folder)
    tokenizer = shards_tokenizer(folder, manifest)
    opened = {split: ShardTokens(folder, manifest, split) for split in SPLITS}
    if verify:
        _verify(folder, manifest, tokenizer.describe())
    train = opened["train"]
    sample = tokenizer.decode(train.read(0, min(SAMPLE_TOKENS, len(train))))
    if as_json:
        facts = {**json.loads(manifest.to_json()), "fingerprint": manifest.fingerprint}
        print(json.dumps({**facts, "verified": verify, "beginning": sample}))
        return
    for line in _page(folder, manifest, tokenizer, sample):
        print_lines(line)
    print_lines(
        "every shard matches the manifest" if verify else "not verified: only sizes and headers were checked"
    )


def _manifest_in(folder: Path) -> Manifest:
    if is_shards(folder):
        return read_manifest(folder)
    with storage_errors("read", folder):
        unfinished = folder.is_dir() and is_unfinished(folder)
    if unfinished:
        raise DataError(f"the shards in {folder} are not finished: the same distgpt data prepare resumes")
    raise DataError(f"{folder} is not a folder of shards: it has no {MANIFEST}")


def _verify(folder: Path, manifest: Manifest, tokenizer: str) -> None:
    """Check every shard, and report everything that is wrong at once."""
    unknown = map(escape, unlisted(folder, manifest))
    complaints = [f"{folder / name} is not in the manifest" for name in unknown]
    done = 0
    width = manifest.shards[0].bytes // manifest.shards[0].tokens

    with watcher("auto", "verifying") as watching:
        watching.began(sum(shard.bytes for shard in manifest.shards), tokenizer)

        def advanced(read: int) -> None:
            nonlocal done
            done += read
            watching.advanced(done, done // width)

        for shard in manifest.shards:
            try:
                verify_shards(folder, manifest, [shard], advanced)
            except DataError as error:
                complaints.append(str(error))
    if complaints:
        raise DataError("; ".join(complaints))


def _page(folder: Path, manifest: Manifest, tokenizer: Tokenizer, sample: str) -> Iterator[str]:
    yield from summary(folder, manifest, tokenizer.describe())
    between = tokenizer.decode(manifest.separator) if manifest.separator else None
    yield f"  documents are separated by {between!r}" if between else "  nothing separates documents"
    rows = [
        [shard.name, f"{shard.tokens:,}", f"{shard.largest:,}", shard.sha256[:16]]
        for shard in manifest.shards
    ]
    yield from ["", *terminal_table(["shard", "tokens", "largest id", "SHA-256"], rows).split("\n"), ""]
    yield "the beginning of the training text:"
    for line in sample.splitlines() or [""]:
        yield f"  | {escape(line)}"
