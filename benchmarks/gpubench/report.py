"""What a section has found so far, on disk after every measurement, failures included."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Report:
    """One section's results. Whoever kills the section finds what it had until then."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._end = path, time.monotonic() + seconds
        self.found: dict[str, Any] = {"rows": {}, "notes": [], "errors": []}

    @property
    def left(self) -> float:
        """Seconds until the section is stopped."""
        return self._end - time.monotonic()

    def row(self, name: str, /, **values: Any) -> None:
        """Add to what is known under this name."""
        self.found["rows"].setdefault(name, {}).update(values)
        self._write()
        words = (f"{key} {_short(value)}" for key, value in values.items() if _short(value))
        print(f"  {name}: {', '.join(words)}", file=sys.stderr, flush=True)

    def note(self, text: str) -> None:
        if text not in self.found["notes"]:
            self.found["notes"].append(text)
            print(f"  note: {text}", file=sys.stderr, flush=True)
            self._write()

    def error(self, where: str, what: str, detail: str = "") -> None:
        self.found["errors"].append({"where": where, "error": what, "detail": detail})
        print(f"  FAILED {where}: {what}", file=sys.stderr, flush=True)
        self._write()

    @contextmanager
    def attempt(self, where: str) -> Iterator[None]:
        """What fails in here is written down, and the section goes on."""
        try:
            yield
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            self.error(where, f"{type(error).__name__}: {lines[0]}"[:500], traceback.format_exc()[-3000:])

    def _write(self) -> None:
        partial = self._path.with_suffix(".part")
        partial.write_text(json.dumps(self.found))
        partial.replace(self._path)


def _short(value: Any) -> str:
    if isinstance(value, bool | str):
        return str(value)
    if isinstance(value, int | float):
        return f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return ""
