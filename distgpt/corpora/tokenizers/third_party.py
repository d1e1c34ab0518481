"""Third-party tokenizers from files and the Hugging Face Hub, with their chat templates.

Files are tokenizer.json, or vocab.json and merges.txt. Downloads use huggingface_hub and its cache.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from hashlib import file_digest
from pathlib import Path
from typing import Any

from distgpt.core.base.checked import JsonObject, parse_object
from distgpt.core.base.errors import DataError, UsageError, first_line
from distgpt.core.base.files import read_small
from distgpt.core.data.tokenizers import (
    ChatTemplate,
    Tokenizer,
    TokenizerKind,
    checked_chat,
    fingerprint,
    read_json,
    unreadable,
)
from distgpt.corpora.tokenizers.bpe import GPT2_FINGERPRINT, SEPARATOR, BpeTokenizer, checked_bpe, spelled
from distgpt.corpora.tokenizers.tokenizer_json import LibraryTokenizer

PREFIX = "hub:"
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "merges.txt")
SHA256 = re.compile("[0-9a-f]{64}")
TIMEOUT = 10  # seconds to the first response; the download itself would try for half a minute


def download_model(repository: str, patterns: Sequence[str]) -> Path:
    """Return a directory with the matching files of a repository. Large files are verified."""

    def download(hub: Any) -> Path:
        return Path(hub.snapshot_download(repository, allow_patterns=list(patterns)))

    directory = _fetched(repository, repository, "a directory with the model", download)
    for path in directory.iterdir():
        _verify(path)
    return directory


def _verify(path: Path) -> None:
    """Verify a file in the hub's cache, and remove it if it is corrupt.

    Large files are named by their SHA-256. Small files have other names and are not verified.
    """
    stored = path.resolve()
    if not SHA256.fullmatch(stored.name):
        return
    with stored.open("rb") as file:
        result = file_digest(file, "sha256").hexdigest()
    if result != stored.name:
        path.unlink()
        stored.unlink()
        raise DataError(
            f"{path.name} does not match the hub's checksum and was removed; run the command again"
        )


def download_tokenizer(repository: str) -> Path:
    """Return the path of tokenizer.json or, if the repository has none, of vocab.json next to merges.txt."""
    here = installed(repository)
    if result := next((here / name for name in TOKENIZER_FILES[:2] if (here / name).is_file()), None):
        return result

    def download(hub: Any) -> Path:
        for local in (True, False):
            for names in (TOKENIZER_FILES[:1], TOKENIZER_FILES[:0:-1]):
                try:
                    for name in names:
                        if not local:
                            hub.get_hf_file_metadata(hub.hf_hub_url(repository, name), timeout=TIMEOUT)
                        path = Path(hub.hf_hub_download(repository, name, local_files_only=local))
                    return path
                except hub.errors.EntryNotFoundError as error:
                    missing = error
        raise missing

    what = f"the tokenizer of {repository}"
    instead = "--tokenizer a directory with its vocab.json and merges.txt, or train one: --tokenizer bpe:N"
    return _fetched(repository, what, instead, download)


def installed(repository: str) -> Path:
    """Return the directory for a tokenizer that an administrator installed for all users."""
    return Path(sys.prefix, "share", "distgpt", "tokenizers", repository)


def _fetched(repository: str, what: str, instead: str, download: Callable[[Any], Path]) -> Path:
    try:
        import huggingface_hub
    except ImportError:
        raise UsageError(
            f"downloading {repository} from the Hugging Face Hub requires huggingface_hub:"
            f" pip install huggingface_hub, or pass {instead}"
        ) from None
    try:
        return download(huggingface_hub)
    except Exception as error:  # The exception depends on the HTTP client of the installed version.
        reason = first_line(error).rstrip(".")
        raise DataError(
            f"cannot download {what} from the Hugging Face Hub ({reason}); without a network, pass {instead}"
        ) from None


CONFIG, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
CHAT_FILES = (CONFIG, TEMPLATE, "generation_config.json", "config.json")
GPT2_REPOSITORY = "openai-community/gpt2"
_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")  # names in templates


def from_document(document: dict[str, Any], source: str) -> Tokenizer:
    """Return the tokenizer described by the contents of a tokenizer.json with a model."""
    is_ours = _is_like_gpt2(document)
    return _from_hugging_face(document, source) if is_ours else LibraryTokenizer(document, source)


def _from_vocab_and_merges(vocab: dict[str, Any], path: Path) -> BpeTokenizer:
    beside = path.with_name(TOKENIZER_FILES[2])
    if not beside.exists():
        raise DataError(f"{path} is a vocabulary without its merges; add {beside.name} to its directory")
    try:
        lines = read_small(beside).decode().replace("\r\n", "\n").split("\n")
    except UnicodeDecodeError as error:
        raise unreadable(str(beside), error) from None
    merges = []
    for number, line in enumerate(lines, start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        if line.count(" ") != 1:
            raise DataError(f"{beside}: line {number} must be two tokens separated by a space: {line!r:.80}")
        merges.append(line.split(" "))
    vocabulary = _in_order(vocab, str(path))
    made = {a + b for a, b in merges}
    separator = vocab[SEPARATOR] if SEPARATOR in vocab and SEPARATOR not in made else None
    return checked_bpe(vocabulary, merges, separator, str(path))


def _from_hugging_face(document: dict[str, Any], source: str) -> BpeTokenizer:
    model = document["model"]
    vocab = model.get("vocab")
    if not isinstance(vocab, dict) or not isinstance(model.get("merges"), list):
        raise DataError(f"{source}: its BPE model has no vocabulary or no merges")
    merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    added = [(token.get("content"), token.get("id")) for token in document.get("added_tokens") or []]
    if not all(isinstance(content, str) and type(token_id) is int for content, token_id in added):
        raise DataError(f"{source}: the added token {added[0]!r:.80} has no content or no id")
    special = {spelled(content): token_id for content, token_id in added}
    separator = next(iter(special.values()), None)
    return checked_bpe(_in_order({**vocab, **special}, source), merges, separator, source)


def _is_like_gpt2(document: dict[str, Any]) -> bool:
    """Return whether this is byte-level BPE as in GPT-2, which our faster encoder supports."""
    model, before = document["model"], document.get("pre_tokenizer")
    others = ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "ignore_merges")
    added = document.get("added_tokens") or []
    return (
        model.get("type", "BPE") == "BPE"
        and not any(model.get(name) for name in others)
        and document.get("normalizer") is None
        and isinstance(before, dict)
        and before.get("type") == "ByteLevel"
        and not before.get("add_prefix_space", True)
        and before.get("use_regex", True) is True
        and isinstance(added, list)
        and len(added) <= 1
        and all(isinstance(token, dict) and token.get("special") for token in added)
    )


def _in_order(vocab: dict[str, Any], source: str) -> list[str]:
    """Return the entries by id. Ids must be 0, 1, 2, … without gaps."""
    vocabulary: list[str | None] = [None] * len(vocab)
    for entry, token_id in vocab.items():
        if type(token_id) is not int or not 0 <= token_id < len(vocab) or vocabulary[token_id] is not None:
            raise DataError(
                f"{source}: {entry!r} has the ID {token_id!r}; the {len(vocab):,} entries must have"
                f" the IDs 0 to {len(vocab) - 1:,}, each once"
            )
        vocabulary[token_id] = entry
    return [entry for entry in vocabulary if entry is not None]


def _chat_beside(folder: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """Return the chat template in this directory and its special tokens, or None."""
    settings, generation, model = (_object(folder / name) for name in (CONFIG, *CHAT_FILES[2:]))
    source = settings.get("chat_template")
    if isinstance(source, list):  # multiple templates by name
        named = {each.get("name"): each.get("template") for each in source if isinstance(each, dict)}
        source = named.get("default")
    if (folder / TEMPLATE).is_file():
        try:
            source = read_small(folder / TEMPLATE).decode()
        except UnicodeDecodeError:
            raise DataError(f"{folder / TEMPLATE} is not valid UTF-8") from None
    ends = _ids(generation.get("eos_token_id")) or _ids(model.get("eos_token_id"))
    if not isinstance(source, str) or not source:
        source = ""
        if not isinstance(tokenizer, LibraryTokenizer) or not ends:
            return None
    tokens = {name: _content(settings.get(name)) for name in _NAMED}
    if tokens["eos_token"] in tokenizer.specials:
        ends.append(tokenizer.specials[tokens["eos_token"]])
    known = [token for token in dict.fromkeys(ends) if 0 <= token < tokenizer.size]
    chat = {"source": source, "tokens": {name: text for name, text in tokens.items() if text}, "ends": known}
    return checked_chat(chat, tokenizer.size, str(folder))


def _object(path: Path) -> dict[str, Any]:
    return parse_object(read_small(path), path) if path.is_file() else {}


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token for token in values if type(token) is int]


def _content(token: Any) -> str:
    """Return the text of a token, given as a string or an object."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else ""


def _from_file(path: Path, document: Any) -> Tokenizer | None:
    """Return the tokenizer in a third-party file, or in a directory with vocab.json and merges.txt."""
    if path.is_dir():
        _, vocab, merges = (path / name for name in TOKENIZER_FILES)
        if not vocab.is_file() or not merges.is_file():
            raise DataError(f"{path} has no tokenizer: neither tokenizer.json nor vocab.json with merges.txt")
        path, document = vocab, read_json(vocab)
    if not isinstance(document, dict):
        return None
    result: Tokenizer
    if isinstance(document.get("model"), dict):
        result = from_document(document, str(path))
    elif document and all(type(token_id) is int for token_id in document.values()):
        result = _from_vocab_and_merges(document, path)
    else:
        return None
    return result.with_chat(_chat_beside(path.parent, result))


def _from_hub(repository: str) -> Tokenizer:
    path = download_tokenizer(repository)
    if (tokenizer := _from_file(path, read_json(path))) is None:
        raise DataError(f"{path} of {repository} is not a tokenizer")
    return tokenizer


def _from_saved(document: JsonObject, source: str) -> Tokenizer:
    inner = document.get("document")
    if not isinstance(inner, dict) or not isinstance(inner.get("model"), dict):
        raise DataError(f"{source}: the tokenizer has no document with a model")
    return LibraryTokenizer(inner, source)


LIBRARY = TokenizerKind(from_json=_from_saved, from_file=_from_file)
GPT2 = TokenizerKind(
    "gpt2",
    from_name=lambda argument: _from_hub(GPT2_REPOSITORY),
    means=lambda argument, tokenizer: fingerprint(tokenizer) == GPT2_FINGERPRINT,  # works offline
)
HUB = TokenizerKind("hub:ORG/NAME", accepts=lambda argument: True, from_name=_from_hub)
