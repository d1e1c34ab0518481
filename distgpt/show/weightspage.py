"""Facts about a file or directory of weights: a model of distgpt or transformers, a checkpoint, a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from distgpt.core.base.errors import DataError, DistgptError, command_line, one_line
from distgpt.core.base.files import storage_errors
from distgpt.core.base.formatting import count
from distgpt.core.components import components
from distgpt.core.config import ModelConfig, RunConfig
from distgpt.core.data.tokenizers import Tokenizer
from distgpt.core.model.counts import parameters
from distgpt.core.model.model import Architecture
from distgpt.core.saved import checkpoint
from distgpt.core.saved.modelfile import BASE, FORMAT, ORIGIN, read_description
from distgpt.core.saved.tensors import Header, read_header, verify_data
from distgpt.core.saved.weights import find_weights, import_command
from distgpt.models.formats.gguf.container import is_gguf
from distgpt.models.formats.gguf.transfer import GgufModel, describe
from distgpt.models.formats.huggingface import CONFIG, PICKLES, Foreign, open_files

_WIDTH = 13  # width of the first column
_SHOWN = (
    *("file", "what", "model", "", "parameters", "tokenizer", "origin", "trained", "best", "data"),
    *("checksum", "imports"),
)


def inspect(path: Path) -> dict[str, Any]:
    """Return the facts by name, in page order. Raise a DataError if anything is corrupt."""
    with storage_errors("read", path):
        path.stat()
        is_directory = path.is_dir()
        names = {file.name for file in path.iterdir()} if is_directory else set()
    if CONFIG in names:
        return _foreign(path)
    if is_directory and ("state.json" in names or path.name.startswith("step-")):
        return _checkpoint(path)
    if is_directory and {"checkpoints", "config.toml"} & names:
        chosen = find_weights(path)
        return {"file": str(chosen), **inspect(chosen)}
    if is_directory or path.suffix in (*PICKLES, ".json"):
        return _foreign(path)  # reports missing files, or how to convert a pickle
    if not path.is_file():
        raise DataError(f"{path} is not a file or a directory")
    if is_gguf(path):
        return describe(path) | _importable(lambda: GgufModel(path), import_command(path, path.stem))
    header = read_header(path)
    if header.metadata.get("format") == FORMAT or {BASE, "format_version"} <= header.metadata.keys():
        return _own(path, header)
    if (path.parent / CONFIG).is_file():
        return _foreign(path)
    result = {"kind": "tensors", "what": f"{len(header.tensors)} tensors in a safetensors file"}
    return result | _data([path], [header]) | {"imports": f"no, because its directory has no {CONFIG}"}


def _own(path: Path, header: Header) -> dict[str, Any]:
    description = read_description(path)
    result: dict[str, Any] = {"kind": "weights", "what": "a model of distgpt"}
    if description.base:
        what = components().part(description.part).describe(description.run)
        result = {"kind": "adapter", "what": f"{what} {description.base.file}"}
    result |= _model(description.run.model, description.tokenizer)
    if ORIGIN in header.metadata:
        result["origin"] = header.metadata[ORIGIN]
    elif description.tokenizer:
        result["trained"] = _training(description.run)
    try:
        best = checkpoint.Best.from_metadata(header.metadata)
    except ValueError as error:
        raise DataError(f"{path} is corrupt: {error}") from None
    if best:
        result["best"] = f"best of its run, after step {best.step}, with validation loss {best.loss:.4f}"
    return result | _data([path], [header])


def _checkpoint(path: Path) -> dict[str, Any]:
    checkpoint.verify(path)
    state = checkpoint.load_document(path)
    description = read_description(path / "weights.safetensors")
    files = sorted(file for file in path.iterdir() if file.suffix == ".safetensors")
    return {
        **state,
        "kind": "checkpoint",
        "what": f"a checkpoint after step {state.get('step')}",
        **_model(description.run.model, description.tokenizer),
        "trained": _training(description.run),
        **_data(files, [read_header(file) for file in files], verify=False),
        "checksum": "verified: every file matches the manifest",
    }


def _foreign(path: Path) -> dict[str, Any]:
    _, settings, headers = open_files(path)
    architectures = settings.values.get("architectures")
    title = architectures[0] if isinstance(architectures, list) and architectures else "model"
    files = f" in {len(headers)} files" if len(headers) > 1 else ""
    result = {"kind": "transformers", "what": f"a {title!s:.80} of transformers{files}"}
    data = _data(list(headers), list(headers.values()))

    def opened() -> Foreign:
        foreign = Foreign(path)
        foreign.verify()
        return foreign

    command = command_line("weights", "import", path, "--out", "FILE")
    return result | data | _importable(opened, command)


def _importable(opened: Callable[[], Any], command: str) -> dict[str, Any]:
    """Return facts about a third-party model, and the command that imports it or why none can."""
    try:
        model = opened()
    except DataError as error:
        return {"imports": f"no: {error}"}
    try:
        facts = _model(model.config, model.tokenizer())
    except DistgptError as error:
        facts = _model(model.config, None) | {"tokenizer": f"none that is usable: {error}"}
    return facts | {"imports": f"yes: {command}"}


def _model(config: ModelConfig, tokenizer: Tokenizer | None) -> dict[str, Any]:
    windows = sum(window > 0 for window in config.windows)
    parts = [
        config.norm,
        f"normalizes {config.norm_groups} groups of channels" * (config.norm_groups > 1),
        config.mlp,
        _positions(config),
        "biases" if config.bias else "biases of queries, keys and values" if config.qkv_bias else "no biases",
        "tied output layer" if config.tied else "untied output layer",
        ("normalized " + "and scaled " * config.qk_norm_gain + "queries and keys") * config.qk_norm,
        "value embeddings" * config.value_embeddings,
        "embedding of the previous token" * config.previous_embedding,
        f"windows of {config.window:,} tokens in {count(windows, 'layer')}" * bool(windows),
    ]
    heads = count(config.n_head, "head")
    if config.attention_width != config.n_embd:
        heads += f" of {config.head_size}"
    if config.kv_heads < config.n_head:
        heads += f" ({config.kv_heads} of keys and values)"
    return {
        "model": f"{count(config.n_layer, 'layer')}, {heads}, width {config.n_embd:,},"
        f" context {config.seq_len:,}, vocabulary {config.vocab_size:,}",
        "parts": ", ".join(filter(None, parts)),
        "parameters": parameters(Architecture(config)).total,
        "tokenizer": tokenizer.describe() if tokenizer else "none",
        "config": {name: getattr(config, name) for name in config.__slots__},
    }


def _positions(config: ModelConfig) -> str:
    scaled = f" scaled {config.rope_factor:g} times ({config.rope_scaling})"
    is_scaled = config.positions == "rope" and config.rope_scaling != "none"
    return f"positions {config.positions}" + (scaled if is_scaled else "")


def _training(run: RunConfig) -> str:
    train = run.train
    per_step = train.batch_size * run.model.seq_len
    return f"on {train.data}, {train.steps:,} steps of {per_step:,} tokens, seed {train.seed}, {train.dtype}"


def _data(files: list[Path], headers: list[Header], verify: bool = True) -> dict[str, Any]:
    with storage_errors("read", files[0]):
        size = sum(file.stat().st_size for file in files)
    types = sorted({entry.dtype for header in headers for entry in header.tensors.values()})
    result = {"types": types, "bytes": size}
    if verify:
        verified = [verify_data(*pair) for pair in zip(files, headers, strict=True)]
        result["checksum"] = "verified" if all(verified) else "none for the data"
    return result


def page(found: dict[str, Any]) -> str:
    data = f"{', '.join(found['types'])}, {found['bytes']:,} bytes"
    shown = {**found, "data": data, "": found.get("parts")}
    if "parameters" in found:
        shown["parameters"] = f"{found['parameters']:,}"
    lines = [f"{title:{_WIDTH}}{shown[title]}" for title in _SHOWN if shown.get(title) is not None]
    return "\n".join(map(one_line, lines))  # escapes line breaks from the file
