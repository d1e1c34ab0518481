"""What an import or an export has made, and what can be done with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Outcome:
    kind: str
    out: Path
    tokenizer: str
    use: str

    def page(self) -> str:
        """For people, a line each."""
        return f"{self.kind:<11}{self.out}\ntokenizer  {self.tokenizer}\nnext       {self.use}"
