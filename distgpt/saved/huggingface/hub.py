"""Models from the Hugging Face Hub, through huggingface_hub and its cache."""

from __future__ import annotations

from pathlib import Path

from distgpt.errors import DataError, UsageError
from distgpt.saved.huggingface.reading import CONFIG, INDEX, TOKENIZER_FILES


def snapshot(repository: str) -> Path:
    """A directory with a repository's files, as far as they are of use here."""
    try:
        import huggingface_hub
    except ImportError:
        raise UsageError(
            f"fetching {repository} from the Hugging Face Hub needs huggingface_hub:"
            " pip install huggingface_hub, or give a directory that holds the model"
        ) from None
    wanted = [CONFIG, INDEX, "model*.safetensors", *TOKENIZER_FILES]
    try:
        return Path(huggingface_hub.snapshot_download(repository, allow_patterns=wanted))
    except (OSError, ValueError, huggingface_hub.errors.HfHubHTTPError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
        raise DataError(
            f"{repository} cannot be fetched from the Hugging Face Hub ({reason});"
            " without a network, give a directory that holds the model"
        ) from None
