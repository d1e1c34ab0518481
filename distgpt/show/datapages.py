"""The output of `distgpt data`: progress, results, and the contents of a directory of shards."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path

from distgpt.core.base.errors import DataError, command_line, escape, print_lines
from distgpt.core.base.files import storage_errors
from distgpt.core.base.formatting import count, size
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
from distgpt.show.display import ByteProgress
from distgpt.show.page import terminal_table

SAMPLE_TOKENS = 64
MOST_SOURCES = 12  # rows


def prepare_and_report(request: Request, progress: str) -> None:
    """Prepare shards and print a summary. `progress` is live, plain, or auto: live on a terminal."""
    is_live = progress == "live" or (progress == "auto" and sys.stderr.isatty())
    with closing(ByteProgress(is_live)) as watching:
        manifest = prepare(request, watching, find_inputs(request.inputs, watching.noted))
    print_lines("\n".join(summary(request.out, manifest, manifest.description)))
    print_lines(f"next: {command_line('train', '--data', request.out)}")


def summary(folder: Path, manifest: Manifest, tokenizer: str) -> list[str]:
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
        lines.append(f"  replaced invalid UTF-8 by U+FFFD {manifest.replaced:,} times")
    return [*lines, *_source_table(manifest)]


def _source_table(manifest: Manifest) -> list[str]:
    """List documents, tokens and share of the largest sources."""
    if len(manifest.sources) < 2:
        return []
    in_all = max(1, sum(tokens for _, tokens in manifest.sources))
    sources = [(name, *pair) for (name, _), pair in zip(manifest.inputs, manifest.sources, strict=True)]
    sources.sort(key=lambda source: (-source[2], source[0]))
    if rest := sources[MOST_SOURCES:]:
        rest_of_all = f"{len(rest)} others", sum(row[1] for row in rest), sum(row[2] for row in rest)
        sources = [*sources[:MOST_SOURCES], rest_of_all]
    rows = [[name, f"{n:,}", f"{tokens:,}", f"{tokens / in_all:.1%}"] for name, n, tokens in sources]
    return ["", *terminal_table(["source", "documents", "tokens", "share"], rows).split("\n"), ""]


def report(folder: Path, as_json: bool, verify: bool) -> None:
    """Print the contents of a directory of shards, or raise an error about it."""
    if not is_shards(folder):
        refuse_unfinished(folder)
        raise DataError(f"{folder} is not a directory of shards: no {MANIFEST}")
    manifest = read_manifest(folder)
    tokenizer = shards_tokenizer(folder, manifest)
    opened = {split: ShardTokens(folder, manifest, split) for split in SPLITS}
    if verify:
        _verify(folder, manifest)
    train = opened["train"]
    sample = tokenizer.decode(train.read(0, min(SAMPLE_TOKENS, len(train))))
    if as_json:
        facts = {**json.loads(manifest.to_json()), "fingerprint": manifest.fingerprint()}
        print(json.dumps({**facts, "verified": verify, "beginning": sample}))
        return
    between = tokenizer.decode(manifest.separator) if manifest.separator else None
    rows = [
        [shard.name, f"{shard.tokens:,}", f"{shard.largest:,}", shard.sha256[:16]]
        for shard in manifest.shards
    ]
    print_lines(
        "\n".join(
            [
                *summary(folder, manifest, tokenizer.describe()),
                f"  documents are separated by {between!r}" if between else "  documents are not separated",
                f"\n{terminal_table(['shard', 'tokens', 'largest id', 'SHA-256'], rows)}\n",
                "start of the training text:",
                *(f"  | {escape(line)}" for line in sample.splitlines() or [""]),
                "every shard matches the manifest"
                if verify
                else "not verified: only sizes and headers were checked",
            ]
        )
    )


def _verify(folder: Path, manifest: Manifest) -> None:
    """Check every shard. Raise one error with all problems."""
    known = {shard.name for shard in manifest.shards}
    with storage_errors("read", folder):
        unlisted = sorted(path.name for path in folder.glob("*.npy") if path.name not in known)
    complaints = [f"{folder / escape(name)} is not in the manifest" for name in unlisted]
    for shard in manifest.shards:
        try:
            verify_shards(folder, manifest, [shard])
        except DataError as error:
            complaints.append(str(error))
    if complaints:
        raise DataError("; ".join(complaints))
