"""A text in a file: found by its name, and read strictly.

Of a file that is not text in UTF-8, guess its kind, and name the command that makes a text of it.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

from distgpt.core.base.errors import DataError, nearest
from distgpt.core.base.files import bundled, open_regular

BUNDLED_TEXTS = ("corpus", "names", "story")
LONGEST_PROMPT = 64 << 20  # bytes

_UNPACKERS = {
    **dict.fromkeys((".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst"), "tar xf"),
    ".zip": "unzip",
    ".7z": "7z x",
    ".zst": "unzstd",
    ".xz": "unxz",
    ".bz2": "bunzip2",
    ".parquet.gz": "gunzip",
}
_OFFICE = (".docx", ".odt", ".epub", ".rtf")
_BINARY = (".npy", ".npz", ".safetensors", ".bin", ".pt", ".pth", ".gguf", ".png", ".jpg", ".jpeg")
# Files that are given by mistake, by the ending of their names, and what to do about it.
ADVICE = {
    **{ending: f"unpack it first: {how} {{path}}" for ending, how in _UNPACKERS.items()},
    **dict.fromkeys(_OFFICE, "pandoc -t plain -o {text} {path} makes a text of it"),
    ".doc": "libreoffice --headless --convert-to txt:Text {path} makes a text of it",
    ".pdf": "pdftotext {path} {text} makes a text of it",
    **dict.fromkeys(_BINARY, "such a file holds no text to train on"),
    **dict.fromkeys((".json", ".json.gz"), "save one object per line, under a name that ends in .jsonl"),
}
# How files begin, and the ending of such names.
_BEGINNINGS = {
    b"%PDF": ".pdf",
    b"PK\x03\x04": ".zip",
    b"\xfd7zXZ": ".xz",
    b"BZh": ".bz2",
    b"7z\xbc\xaf": ".7z",
    b"\x28\xb5\x2f\xfd": ".zst",
}
_GZIP = b"\x1f\x8b"
_SAMPLE = 1 << 15  # bytes before and after the first that cannot be decoded, by which an encoding is guessed
_MANY = 0.2  # of the bytes: above ASCII there are more only in other scripts than Latin


def resolve_data(name: str) -> Path:
    """Return what `--data` names: a bundled text, else the path of a file or a folder."""
    if name in BUNDLED_TEXTS:
        return bundled("data", f"{name}.txt")
    try:
        Path(name).stat()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise DataError(
            f"{name!r} is no readable file ({reason}) and no bundled text{nearest(name, BUNDLED_TEXTS)}"
        ) from None
    return Path(name)


def read_text(path: Path, stream: BinaryIO | None = None) -> str:
    """Return a file's text: strict UTF-8, without a byte order mark, with \\n for line breaks, never empty.

    Where a `stream` is given, it is read instead, up to a length that no prompt has.
    """
    try:
        with nullcontext(stream) if stream else open_regular(path) as file:
            text = file.read(LONGEST_PROMPT if stream else -1).decode("utf-8")
    except UnicodeDecodeError as error:
        found = remedy(None if stream else path, error.object, error.start)
        raise DataError(f"{path} is not UTF-8 text, byte {error.start} cannot be decoded: {found}") from None
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    if not text:
        raise DataError(f"{path} is empty; give a file with some text in it")
    return text


def advice(path: Path, ending: str = "") -> str:
    """Return advice for a file by the ending of its name, or by another `ending`; "" if it may be a text."""
    name = ending or path.name.lower()
    names = {"path": shlex.quote(str(path)), "text": shlex.quote(str(path.with_suffix(".txt")))}
    return next((advised.format(**names) for each, advised in ADVICE.items() if name.endswith(each)), "")


def refuse_by_name(path: Path) -> None:
    """Refuse a file that is no text by the ending of its name."""
    if why := advice(path):
        raise DataError(f"{path} is not read, by the ending of its name: {why}")


def remedy(path: Path | None, content: bytes, at: int = 0) -> str:
    """Return the likely kind of a file whose byte `at` is not UTF-8, and a remedy. No path: it is a pipe."""
    if content.startswith(_GZIP):
        return "it is compressed: unpack it first, or let its name end in .txt.gz"
    ending = next((ending for start, ending in _BEGINNINGS.items() if content.startswith(start)), "")
    if ending:
        return f"it seems to be a {ending[1:]} file" + (f": {advice(path, ending)}" if path else "")
    kind, name = _encoding(content[max(0, at - _SAMPLE) & ~1 :][: 2 * _SAMPLE])
    if not name:
        return kind
    command = f"iconv {'-c ' if name == 'UTF-8' else ''}-f {name} -t UTF-8"
    if path is None:
        return f"{kind}: {command} converts it"
    other = path.with_name(f"{path.stem}-utf8{path.suffix or '.txt'}")
    return f"{kind}: {command} {shlex.quote(str(path))} > {shlex.quote(str(other))}"


def remedy_for(documents: Iterable[bytes]) -> str:
    """Return the remedy for the first document that is not UTF-8, after a colon; "" if all are."""
    for content in documents:
        try:
            content.decode()
        except UnicodeDecodeError as error:
            return f": {remedy(None, content, error.start)}"
    return ""


def _encoding(sample: bytes) -> tuple[str, str]:
    """Guess an encoding: a description, and its name for iconv, "" for a file that is no text."""
    if sample.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "it is UTF-16", "UTF-16"
    for name, high in (("UTF-16LE", sample[1::2]), ("UTF-16BE", sample[::2])):
        if high.count(0) > len(high) / 2 and sample.count(0) < 1.2 * high.count(0):
            return "it seems to be UTF-16", name
    if sum(map(sample.count, range(7))) > len(sample) / 100:
        return "it seems to be no text at all", ""
    broken, above = sample.decode("utf-8", "replace").count("\ufffd"), sum(byte > 127 for byte in sample)
    if above > 3 * broken:  # most of them make whole characters
        return "it seems to be UTF-8 with damaged places", "UTF-8"
    if above > _MANY * len(sample):
        return "it is in another encoding (iconv -l lists them)", "ENCODING"
    return "it seems to be Latin-1", "WINDOWS-1252"
