"""Text files: resolving a name, and strict reading."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

from distgpt.core.base.errors import DataError, did_you_mean
from distgpt.core.base.files import bundled, open_regular

BUNDLED_TEXTS = ("corpus", "names", "story", "tales")
LONGEST_PROMPT = 64 << 20  # bytes
CONVERT = "convert it first (iconv -f ENCODING -t UTF-8)"

# Advice for common mistakes, by file extension.
ADVICE = {
    (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip", ".7z", ".zst", ".xz", ".bz2", ".parquet.gz"): (
        "unpack it first"
    ),
    (".docx", ".odt", ".epub", ".rtf", ".doc", ".pdf"): "convert it to plain text first",
    (".npy", ".npz", ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".png", ".jpg", ".jpeg"): (
        "it is not a text file"
    ),
    (".json", ".json.gz"): "save one object per line, in a .jsonl file",
}


def resolve_data(name: str) -> Path:
    """Return the path of a bundled text, a file or a directory that `--data` names."""
    if name in BUNDLED_TEXTS:
        return bundled("data", f"{name}.txt")
    try:
        Path(name).stat()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"cannot read {name!r} ({reason}), and it is not a bundled text"
            f"{did_you_mean(name, BUNDLED_TEXTS)}"
        ) from None
    return Path(name)


def read_text(path: Path, stream: BinaryIO | None = None) -> str:
    """Return a file's text: strict UTF-8, no byte order mark, \\n line breaks, never empty.

    If `stream` is given, read it instead, up to a maximum length for prompts.
    """
    try:
        with nullcontext(stream) if stream else open_regular(path) as file:
            text = file.read(LONGEST_PROMPT if stream else -1).decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"{path} is not UTF-8 text (byte {error.start})"
        raise DataError(f"{what}; {CONVERT}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    if not text:
        raise DataError(f"{path} is empty; choose a file with text")
    return text


def advice(path: Path) -> str:
    """Return advice for a file by its extension; "" if it may be text."""
    name = path.name.lower()
    return next((advised for endings, advised in ADVICE.items() if name.endswith(endings)), "")


def refuse_by_name(path: Path) -> None:
    """Raise a DataError if a file's extension shows that it is not text."""
    if why := advice(path):
        raise DataError(f"cannot read {path} as text: {why}")
