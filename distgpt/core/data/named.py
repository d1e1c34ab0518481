"""Names that users give texts: a bundled one, else the path of a file or a folder."""

from __future__ import annotations

from pathlib import Path

from distgpt.core.base.errors import DataError, nearest
from distgpt.core.base.files import bundled

BUNDLED_TEXTS = ("corpus", "names", "story")


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
