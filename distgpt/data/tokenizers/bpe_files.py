"""BPE as others keep it: Hugging Face's tokenizer.json, GPT-2's vocab.json and merges.txt, the hub."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from distgpt.data.tokenizers.bpe import SEPARATOR, BpeTokenizer, checked, spelled
from distgpt.errors import DataError, UsageError

GPT2 = "openai-community/gpt2"
NAMES = ("tokenizer.json", "vocab.json", "merges.txt")
OTHER_KIND = "is not byte-level BPE as in GPT-2, the only kind of foreign tokenizer that is read"
SURROGATE = re.compile("[\ud800-\udfff]")


def find(word: str) -> Path | None:
    """The JSON file behind a path: itself, or the one in a directory. None if nothing is there."""
    path = Path(word)
    try:
        path.stat()
        if not path.is_dir():
            return path
        if (path / NAMES[0]).is_file():
            return path / NAMES[0]
        if all((path / name).is_file() for name in NAMES[1:]):
            return path / NAMES[1]
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise _unreadable(word, error) from None
    raise DataError(f"{word} holds no tokenizer: neither tokenizer.json nor vocab.json with merges.txt")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text("utf-8"))
    except (UnicodeDecodeError, OSError) as error:
        raise _unreadable(str(path), error) from None
    except (ValueError, RecursionError):
        raise DataError(f"{path} is not a saved tokenizer: it is not JSON") from None


def from_foreign(document: dict[str, Any], path: Path) -> BpeTokenizer | None:
    """The tokenizer in a file that distgpt did not write; None if it looks like none that is known."""
    if isinstance(document.get("model"), dict):
        return _from_hugging_face(document, str(path))
    if document and all(type(token_id) is int for token_id in document.values()):
        return _from_vocab_and_merges(document, path)
    return None


def hub_repository(word: str) -> str | None:
    """The repository that a word means, or None if it means none."""
    if word == "gpt2":
        return GPT2
    return word.removeprefix("hub:") if word.startswith("hub:") else None


def from_hub(repository: str) -> BpeTokenizer:
    """Downloaded at the first time, from huggingface_hub's cache from then on."""
    try:
        import huggingface_hub
    except ImportError:
        raise UsageError(
            f"reading {repository} from the Hugging Face Hub needs huggingface_hub:"
            " pip install huggingface_hub, or give a directory with its vocab.json and merges.txt"
        ) from None
    try:
        path = _fetched(huggingface_hub, repository)
    except Exception as error:  # what is raised depends on the HTTP client of the installed version
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise DataError(
            f"the tokenizer of {repository} cannot be fetched from the Hugging Face Hub ({reason});"
            " without a network, give a directory with its vocab.json and merges.txt"
        ) from None
    tokenizer = from_foreign(read_json(path), path)
    if tokenizer is None:
        raise DataError(f"{path} of {repository} is not a tokenizer")
    return tokenizer


def _fetched(hub: Any, repository: str) -> Path:
    """tokenizer.json, or where the repository has none, vocab.json beside merges.txt."""
    for local in (True, False):
        for names in (NAMES[:1], NAMES[:0:-1]):
            try:
                for name in names:
                    if not local:  # once, where the download itself would try for half a minute
                        hub.get_hf_file_metadata(hub.hf_hub_url(repository, name), timeout=10)
                    path = Path(hub.hf_hub_download(repository, name, local_files_only=local))
                return path
            except hub.errors.EntryNotFoundError as error:
                missing = error
    raise missing


def _from_vocab_and_merges(vocab: dict[str, Any], path: Path) -> BpeTokenizer:
    beside = path.with_name(NAMES[2])
    try:
        lines = beside.read_text("utf-8").split("\n")
    except FileNotFoundError:
        raise DataError(
            f"{path} is a vocabulary without its merges: {beside.name} must lie beside it"
        ) from None
    except (OSError, ValueError) as error:
        raise _unreadable(str(beside), error) from None
    merges = []
    for number, line in enumerate(lines, start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        if line.count(" ") != 1:
            raise DataError(f"{beside}: line {number} is not two tokens with a space between: {line!r}")
        merges.append(line.split(" "))
    vocabulary = _in_order(vocab, str(path))
    made = {a + b for a, b in merges}
    separator = vocab[SEPARATOR] if SEPARATOR in vocab and SEPARATOR not in made else None
    return checked(vocabulary, merges, separator, str(path))


def _from_hugging_face(document: dict[str, Any], source: str) -> BpeTokenizer:
    model = document["model"]
    _refuse_other_kinds(document, model, source)
    vocab, added = model.get("vocab"), document.get("added_tokens") or []
    if not isinstance(vocab, dict) or not isinstance(model.get("merges"), list):
        raise DataError(f"{source}: its BPE model has no vocabulary or no merges")
    special = _special_tokens(added, source)
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    both = {**vocab, **special}
    endings = [SEPARATOR] if SEPARATOR in special else list(special) if len(special) == 1 else []
    separator = special[endings[0]] if endings else None
    return checked(_in_order(both, source), merges, separator, source)


def _refuse_other_kinds(document: dict[str, Any], model: dict[str, Any], source: str) -> None:
    """A DataError that says what is different, unless this is byte-level BPE as in GPT-2."""
    before = document.get("pre_tokenizer")
    before = before if isinstance(before, dict) else {"type": None}
    differences = {
        f"its model is {model.get('type')!r}": model.get("type", "BPE") != "BPE",
        "it normalizes text first": document.get("normalizer") is not None,
        f"its pre-tokenizer is {before.get('type')!r}": before.get("type") != "ByteLevel",
        "its pre-tokenizer puts a space before the text": bool(before.get("add_prefix_space", True)),
        "its pre-tokenizer does not split like GPT-2's": before.get("use_regex", True) is not True,
        **{
            f"its model sets {name}": bool(model.get(name))
            for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
        },
    }
    for difference, present in differences.items():
        if present:
            raise DataError(f"{source} {OTHER_KIND}: {difference}")


def _special_tokens(added: Any, source: str) -> dict[str, int]:
    special: dict[str, int] = {}
    for token in added if isinstance(added, list) else [None]:
        fields = token if isinstance(token, dict) else {}
        content, token_id = fields.get("content"), fields.get("id")
        if not isinstance(content, str) or SURROGATE.search(content) or type(token_id) is not int:
            raise DataError(f"{source}: the added token {token!r} has no content or no id")
        if not fields.get("special"):
            raise DataError(f"{source} {OTHER_KIND}: it cuts {content!r} out of the text first")
        special[spelled(content)] = token_id
    return special


def _in_order(vocab: dict[str, Any], source: str) -> list[str]:
    """The entries by id, which run from 0 without a hole."""
    vocabulary: list[str | None] = [None] * len(vocab)
    for entry, token_id in vocab.items():
        if type(token_id) is not int or not 0 <= token_id < len(vocab) or vocabulary[token_id] is not None:
            raise DataError(
                f"{source}: {entry!r} has the id {token_id!r}; the {len(vocab):,} entries must have"
                f" the ids 0 to {len(vocab) - 1:,}, each once"
            )
        vocabulary[token_id] = entry
    return [entry for entry in vocabulary if entry is not None]


def _unreadable(name: str, error: OSError | ValueError) -> DataError:
    reason = getattr(error, "strerror", None) or error
    return DataError(f"{name!r} cannot be read as a saved tokenizer: {reason}")
