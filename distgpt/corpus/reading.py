"""From a file to tokens on every rank: found, read, tokenized and judged by rank 0 alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from distgpt.comm.agree import on_root
from distgpt.comm.api import Comm
from distgpt.config import nearest
from distgpt.corpus.tokenizer import Ids, Tokenizer, build_tokenizer, tokenizer_from_json
from distgpt.errors import DataError

BUNDLED_TEXTS = ("corpus", "names", "story")


def bundled(kind: str, name: str) -> Path:
    """A file that comes with distgpt; `kind` is "data" or "weights"."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "bundled", package.parent):  # installed; a source checkout
        if (path := folder / kind / name).is_file():
            return path
    raise DataError(
        f"the bundled file {kind}/{name} is missing from this installation; install distgpt again"
    )


def resolve_data(word: str) -> Path:
    """The file behind `--data`: a bundled text's name, else a path."""
    if word in BUNDLED_TEXTS:
        return bundled("data", f"{word}.txt")
    try:
        Path(word).stat()
    except (OSError, ValueError) as error:
        raise DataError(
            f"{word!r} is no readable file ({_reason(error)}) and no bundled text"
            f"{nearest(word, BUNDLED_TEXTS)}"
        ) from None
    return Path(word)


def read_text(path: Path) -> str:
    """A file's text: strict UTF-8, without a byte order mark, with \\n for line breaks, never empty."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: byte {error.start} cannot be decoded") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {_reason(error)}") from None
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    if not text:
        raise DataError(f"{path} is empty; give a file with some text in it")
    return text


def load_corpus(
    comm: Comm, data: str, tokenizer_choice: str, seq_len: int, existing: Tokenizer | None = None
) -> tuple[Tokenizer, Ids]:
    """The tokenizer and all tokens of a text, the same on every rank. Collective.

    Rank 0 reads the file and either uses `existing` or builds `tokenizer_choice`; what it finds wrong is
    raised on all ranks. The tokens travel as one plain buffer.
    """
    found: list[Ids] = []

    def read() -> dict[str, Any]:
        path = resolve_data(data)
        tokenizer, tokens = _tokenize(path, tokenizer_choice, existing)
        if len(tokens) < 2:
            raise DataError(
                f"{path} gives {len(tokens)} token(s): at least 2 are needed to learn what follows what"
                f" (fewer than seq_len + 1 = {seq_len + 1} are repeated)"
            )
        found.append(tokens)
        return {"tokenizer": tokenizer.to_json(), "dtype": tokens.dtype.name, "length": len(tokens)}

    verdict = on_root(comm, read)
    tokens = found[0] if found else np.empty(verdict["length"], verdict["dtype"])
    comm.broadcast(tokens)
    return tokenizer_from_json(verdict["tokenizer"], "rank 0's tokenizer"), tokens


def _tokenize(path: Path, choice: str, existing: Tokenizer | None) -> tuple[Tokenizer, Ids]:
    text = read_text(path)
    tokenizer = existing or build_tokenizer(choice, text)
    try:
        return tokenizer, tokenizer.encode(text)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
