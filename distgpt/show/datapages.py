"""The output of `distgpt data`: its progress, its result, and the contents of a folder of shards."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from distgpt.core.base.errors import DataError, command_line, escape, print_lines
from distgpt.core.base.files import storage_errors
from distgpt.core.base.formatting import count, size
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.corpora.prepare.documents import find_inputs
from distgpt.corpora.prepare.preparing import Request, prepare, refuse_unfinished
from distgpt.corpora.shards import (
    MANIFEST,
    SPLITS,
    Manifest,
    ShardTokens,
    is_shards,
    read_manifest,
    shards_tokenizer,
    verify_shards,
)
from distgpt.show.page import terminal_table
from distgpt.show.progress import ByteProgress

SAMPLE_TOKENS = 64
MOST_SOURCES = 12  # rows; more files than that are shown by folder


def watcher(progress: str, label: str) -> closing[ByteProgress]:
    """`progress` is live, plain, or auto: live on a terminal."""
    return closing(ByteProgress(label, progress == "live" or (progress == "auto" and sys.stderr.isatty())))


def prepare_and_report(request: Request, progress: str) -> None:
    with watcher(progress, "tokenizing") as watching:
        manifest = prepare(request, watching, find_inputs(request.inputs, watching.noted))
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
    if not is_shards(folder):
        refuse_unfinished(folder)
        raise DataError(f"{folder} is not a folder of shards: it has no {MANIFEST}")
    manifest = read_manifest(folder)
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


def unlisted(folder: Path, manifest: Manifest) -> list[str]:
    """Return the names of files that look like shards but are not in the manifest."""
    known = {shard.name for shard in manifest.shards}
    with storage_errors("read", folder):
        return sorted(path.name for path in folder.glob("*.npy") if path.name not in known)
