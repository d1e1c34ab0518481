"""What a model is measured by, while it trains and afterwards."""

from __future__ import annotations

import time
from typing import Any

from distgpt.comm.api import Comm
from distgpt.evaluation.hellaswag import HellaSwag
from distgpt.evaluation.scoring import Scorer
from distgpt.evaluation.validation import Validation
from distgpt.model.model import Model


class Assessment:
    """Either measure may be missing; without any, the assessment is false."""

    def __init__(
        self, model: Model, comm: Comm, validation: Validation | None, hellaswag: HellaSwag | None
    ) -> None:
        self.validation, self.hellaswag = validation, hellaswag
        self.scorer = Scorer(model, comm)

    def __bool__(self) -> bool:
        return self.validation is not None or self.hellaswag is not None

    def measure(self) -> dict[str, Any]:
        """As a line of metrics.jsonl has it. Collective."""
        found: dict[str, Any] = {}
        if self.validation is not None:
            begun = time.perf_counter()
            held = self.validation.measure(self.scorer)
            seconds = time.perf_counter() - begun
            found |= {"val_loss": held.loss, "val_tokens": held.tokens, "val_s": seconds}
        if self.hellaswag is not None:
            accuracy = self.hellaswag.measure(self.scorer)
            found |= {"hellaswag": accuracy.per_token, "hellaswag_examples": accuracy.examples}
        return found
