"""The workload that all stages run: its configuration, its prompt, and whether it is the course project's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from distgpt.core.base.errors import UsageError
from distgpt.core.comm.serial import SerialComm
from distgpt.core.config import RunConfig
from distgpt.core.config.asked import asked_for
from distgpt.core.config.presets import preset
from distgpt.core.data.loading import DataRequest, load_corpus
from distgpt.core.model.model import Architecture
from distgpt.core.model.optim import learning_rate
from distgpt.core.saved.modelfile import read_description
from distgpt.core.train.plan import new_run
from distgpt.measure import published
from distgpt.recipes.derived import derived

SHORT = 21  # epochs: enough for the published losses of epoch 20
PROMPT_TOKENS, NEW_TOKENS = 256, 30  # as in the project

# Settings that may differ from the project's without making it another workload.
FREE = {
    *("steps", "min_lr", "seed", "dtype", "matmul", "sample_every"),
    *("save_every", "save_minutes", "save", "on_disk_error"),
    *("keep", "keep_every", "keep_every_minutes"),
    *("on_bad_step", "spike_zscore", "bad_steps_allowed"),
    *("verify_every", "verify_data", "grad_accum", "grad_sync", "reproducible_parts", "recompute"),
}


@dataclass(frozen=True, slots=True)
class Workload:
    """`is_projects`: the model, data and learning rates are the course project's, maybe not to the end."""

    name: str
    run: RunConfig
    is_projects: bool

    def sentence(self) -> str:
        """Describe the workload."""
        t, model = self.run.train, self.run.model
        steps = f"{t.steps} steps of {t.batch_size} × {model.seq_len} tokens"
        if not self.is_projects:
            return f"{self.name}: {steps}"
        of_all = "all" if t.steps == published.EPOCHS else f"the first {t.steps} of its"
        return (
            f"the course project's model and training, {of_all} {published.EPOCHS} epochs"
            f" at their learning rates: {steps}"
        )


def find_workload(
    preset_name: str | None,
    toml: Path | None,
    flags: Mapping[str, Any],
    full: bool,
    deterministic: bool = False,
) -> Workload:
    """Return the workload that the options ask for. The project's is cut short unless `full`."""
    default = published.PRESET if toml is None else None
    asked = asked_for({**flags, "deterministic": deterministic}, preset_name or default, toml)
    run = new_run(derived(asked, 1))
    is_projects = _is_projects(run)
    if full and not (is_projects and run.train.steps == published.EPOCHS):
        raise UsageError("--full is for the course project's workload; set the length of others with --steps")
    if is_projects and run.train.steps == published.EPOCHS and not full and "steps" not in flags:
        # Its first steps, at the learning rates that a linear schedule has there.
        run = run.with_values({"steps": SHORT, "min_lr": learning_rate(run.train, SHORT)})
    return Workload(asked.name, run, is_projects)


def _is_projects(run: RunConfig) -> bool:
    whole = preset(published.PRESET)
    ours, theirs = (asdict(each.model) | asdict(each.train) for each in (run, whole))
    if any(ours[name] != theirs[name] for name in ours.keys() - FREE) or ours["steps"] > theirs["steps"]:
        return False
    rates = (
        (learning_rate(run.train, step), learning_rate(whole.train, step)) for step in range(ours["steps"])
    )
    return all(abs(rate / projects - 1) < 1e-9 for rate, projects in rates)


@dataclass(frozen=True, slots=True)
class Opening:
    """The prompt, and the sizes that depend on the data."""

    prompt: str
    parameters: int
    vocabulary: int
    corpus_tokens: int


def look_at_data(run: RunConfig) -> Opening:
    """Read the data: the text that the models will continue, and the size they will have."""
    t = run.train
    origin = read_description(Path(t.init)) if t.init else None
    existing = origin.tokenizer if origin else None
    wanted = DataRequest(t.data, t.tokenizer, run.model.seq_len, t.val_fraction, False, existing=existing)
    corpus = load_corpus(SerialComm(), wanted)
    described = origin.run.model.vocab_size if origin else 0
    size = run.model.vocab_size or described or corpus.tokenizer.size
    model = Architecture(replace(run.model, vocab_size=size))
    text = corpus.tokenizer.decode(corpus.train.read(0, min(PROMPT_TOKENS, len(corpus.train))))
    prompt = text.rstrip("\ufffd") or text  # without a character that the tokens hold in part only
    return Opening(prompt, model.layout.elements, size, len(corpus.train))
