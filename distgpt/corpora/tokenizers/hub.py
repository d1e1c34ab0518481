"""Downloads from the Hugging Face Hub, through huggingface_hub and its cache."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from hashlib import file_digest
from pathlib import Path
from typing import Any

from distgpt.core.base.errors import DataError, UsageError, first_line

PREFIX = "hub:"
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt")
SHA256 = re.compile("[0-9a-f]{64}")
TIMEOUT = 10  # seconds, for the first answer; the download itself would try for half a minute


def download_model(repository: str, patterns: Sequence[str]) -> Path:
    """Return a directory with the files of a repository that match these patterns, large ones verified."""

    def download(hub: Any) -> Path:
        return Path(hub.snapshot_download(repository, allow_patterns=list(patterns)))

    directory = _from_hub(repository, repository, "a directory that holds the model", download)
    for path in directory.iterdir():
        _verify(path)
    return directory


def _verify(path: Path) -> None:
    """Refuse a file in the hub's cache that is not what its name there says, and remove it.

    That is the SHA-256 of a large file; small ones have another kind of name.
    """
    stored = path.resolve()
    if not SHA256.fullmatch(stored.name):
        return
    with stored.open("rb") as file:
        found = file_digest(file, "sha256").hexdigest()
    if found != stored.name:
        path.unlink()
        stored.unlink()
        raise DataError(
            f"{path.name} is not what the hub says: it was removed; run this again to fetch it anew"
        )


def download_tokenizer(repository: str) -> Path:
    """Return tokenizer.json or, where the repository has none, vocab.json beside merges.txt."""
    here = installed(repository)
    if found := next((here / name for name in TOKENIZER_FILES[:2] if (here / name).is_file()), None):
        return found

    def download(hub: Any) -> Path:
        for local in (True, False):
            for names in (TOKENIZER_FILES[:1], TOKENIZER_FILES[:0:-1]):
                try:
                    for name in names:
                        if not local:
                            hub.get_hf_file_metadata(hub.hf_hub_url(repository, name), timeout=TIMEOUT)
                        path = Path(hub.hf_hub_download(repository, name, local_files_only=local))
                    return path
                except hub.errors.EntryNotFoundError as error:
                    missing = error
        raise missing

    what = f"the tokenizer of {repository}"
    instead = "--tokenizer a directory with its vocab.json and merges.txt, or learn one: --tokenizer bpe:N"
    return _from_hub(repository, what, instead, download)


def installed(repository: str) -> Path:
    """Return the directory in which an administrator may put this tokenizer for all users."""
    return Path(sys.prefix, "share", "distgpt", "tokenizers", repository)


def cache() -> Path:
    """Return the folder in which huggingface_hub keeps what it has fetched."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _from_hub(repository: str, what: str, instead: str, download: Callable[[Any], Path]) -> Path:
    try:
        import huggingface_hub
    except ImportError:
        raise UsageError(
            f"fetching {repository} from the Hugging Face Hub needs huggingface_hub:"
            f" pip install huggingface_hub, or give {instead}"
        ) from None
    try:
        return download(huggingface_hub)
    except Exception as error:  # what is raised depends on the HTTP client of the installed version
        reason = first_line(error).rstrip(".")
        raise DataError(
            f"{what} cannot be fetched from the Hugging Face Hub ({reason});"
            f" without a network, give {instead}"
        ) from None
