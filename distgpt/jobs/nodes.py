"""Find before a job waits what its nodes could not do: files that they lack, a tokenizer to be fetched."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from distgpt.core.base.errors import DataError
from distgpt.core.config import RunConfig
from distgpt.core.data.loading import refuse_missing
from distgpt.core.data.textfile import resolve_data
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.texts.shards import is_shards
from distgpt.texts.tokenizers import hub
from distgpt.texts.tokenizers.foreign import repository_of


def refuse_unready(run: RunConfig) -> str:
    """Refuse files that are not there; fetch the tokenizer, as nodes may have no network. Returns a note."""
    t = run.train
    refuse_missing([t.data, *[t.val] * bool(t.val)], t.tokenizer)
    if t.hellaswag and not Path(t.hellaswag).is_file():
        raise DataError(f"--hellaswag {t.hellaswag}: there is no such file")
    # GPT-2's is known without its files where texts are tokenized already, or by the model's own tokenizer.
    is_known = t.tokenizer == "gpt2" and (bool(t.init) or is_shards(resolve_data(t.data)))
    if is_known or not (t.tokenizer == "gpt2" or t.tokenizer.startswith(hub.PREFIX)):
        return ""
    _fetch(t.tokenizer)
    if hub.installed(repository_of(t.tokenizer)).is_dir():  # nodes see it as they see this program
        return ""
    return (
        f"--tokenizer {t.tokenizer} lies in {hub.cache()}, which nodes without internet have to see, too:"
        " DISTGPT_CACHE or HF_HOME says where it is"
    )


@cache
def _fetch(tokenizer: str) -> None:
    """Load a tokenizer, once for all elements of an array."""
    load_tokenizer(tokenizer)
