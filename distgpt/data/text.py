"""Finding and reading text: bundled files by name, others by path."""

from __future__ import annotations

from pathlib import Path

from distgpt.config import nearest
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
    """What is behind `--data`: a bundled text's name, else the path of a file or a folder."""
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


def _reason(error: OSError | ValueError) -> str:
    return getattr(error, "strerror", None) or str(error)
