"""The workload that all stages run: its configuration, its prompt, and whether it is the course project's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from distgpt.comm.serial import SerialComm
from distgpt.config import RunConfig
from distgpt.config.presets import preset
from distgpt.data.loading import Corpus, DataRequest, load_corpus
from distgpt.data.tokenizers.naming import Tokenizer
from distgpt.errors import UsageError
from distgpt.measure import published
from distgpt.model.model import Architecture
from distgpt.model.optim import learning_rate
from distgpt.saved.modelfile import read_description
from distgpt.training.plan import configure

SHORT = 21  # epochs: enough for the published losses of epoch 20
PROMPT_TOKENS, NEW_TOKENS = 256, 30  # as in the project

# Settings that may differ from the project's without making it another workload.
FREE = {
    *("steps", "min_lr", "seed", "dtype", "log_every", "save_every", "keep", "sample_every", "verify_every"),
    *("verify_data", "grad_accum", "grad_sync", "recompute"),
}


@dataclass(frozen=True, slots=True)
class Workload:
    """`is_projects`: the model, data and learning rates are the course project's, maybe not to the end."""

    name: str
    run: RunConfig
    is_projects: bool

    def epochs(self) -> tuple[int, ...]:
        """Steps whose losses make a table, counted from 0: the published ones, or six from first to last."""
        last = self.run.train.steps - 1
        if self.is_projects:
            return tuple(epoch for epoch in published.EPOCHS_SHOWN if epoch <= last)
        return tuple(sorted({round(last * part / 5) for part in range(6)}))

    def sentence(self) -> str:
        """The workload in words."""
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
    preset_name: str | None, toml: Path | None, flags: Mapping[str, Any], full: bool
) -> Workload:
    """The workload that the options ask for. The project's is cut short unless `full`."""
    if flags.get("log_every", 1) != 1:
        raise UsageError("--log-every: the losses of all steps are compared, so all have to be logged")
    default = published.PRESET if toml is None else None
    name, run = configure(SerialComm(), preset_name or default, toml, flags)
    run = run.with_values({"log_every": 1})
    is_projects = _is_projects(run)
    if full and not (is_projects and run.train.steps == published.EPOCHS):
        raise UsageError("--full is for the course project's workload; set the length of others with --steps")
    if is_projects and run.train.steps == published.EPOCHS and not full and "steps" not in flags:
        run = _beginning(run, SHORT)
    return Workload(name, run, is_projects)


def _beginning(run: RunConfig, steps: int) -> RunConfig:
    """The first steps of a run with a linear schedule, at the learning rates that they have there."""
    return run.with_values({"steps": steps, "min_lr": learning_rate(run.train, steps)})


def _is_projects(run: RunConfig) -> bool:
    whole = preset(published.PRESET)
    same = all(
        getattr(ours, field.name) == getattr(theirs, field.name)
        for ours, theirs in ((run.model, whole.model), (run.train, whole.train))
        for field in fields(ours)
        if field.name not in FREE
    )
    return (
        same
        and run.train.steps <= whole.train.steps
        and all(
            abs(learning_rate(run.train, step) / learning_rate(whole.train, step) - 1) < 1e-9
            for step in range(run.train.steps)
        )
    )


@dataclass(frozen=True, slots=True)
class Opening:
    """The prompt, and the sizes that depend on the data."""

    prompt: str
    parameters: int
    vocabulary: int
    corpus_tokens: int


def look_at_data(run: RunConfig) -> Opening:
    """Read the data: the text that the models will continue, and the size they will have."""
    corpus, described = _corpus(run)
    size = run.model.vocab_size or described or corpus.tokenizer.size
    model = Architecture(replace(run.model, vocab_size=size))
    return Opening(_prompt(corpus, corpus.tokenizer), model.layout.size, size, len(corpus.train))


def _corpus(run: RunConfig) -> tuple[Corpus, int]:
    t = run.train
    origin = read_description(Path(t.init)) if t.init else None
    existing = origin.tokenizer if origin else None
    wanted = DataRequest(t.data, t.tokenizer, run.model.seq_len, t.val_fraction, False, existing=existing)
    return load_corpus(SerialComm(), wanted), origin.run.model.vocab_size if origin else 0


def _prompt(corpus: Corpus, tokenizer: Tokenizer) -> str:
    """The text of the first tokens, without a character that they hold in part only."""
    tokens = corpus.train
    text = tokenizer.decode(tokens.read(0, min(PROMPT_TOKENS, len(tokens))))
    return text.rstrip("\ufffd") or text
