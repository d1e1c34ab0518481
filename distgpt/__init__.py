"""distgpt: pretrain and run GPT-2-style models from one CPU core to many nodes.

>>> import distgpt
>>> model = distgpt.load("weights.safetensors")
>>> model.generate("Once upon a time", max_new_tokens=50)
>>> distgpt.train(data="my.txt", tokenizer="char", steps=500, on_step=print).model
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from distgpt.assembly import AllComponents
from distgpt.core.base import __version__
from distgpt.core.components import install

if sys.platform == "win32":
    _REFUSED = "distgpt runs on Linux and macOS; on Windows, start it inside WSL (wsl --install)"
    if sys.argv[0].removesuffix(".exe").endswith(("distgpt", "-m")):  # the command prints no traceback
        sys.exit(_REFUSED)
    raise ImportError(_REFUSED)

install(AllComponents())

if TYPE_CHECKING:
    from distgpt.api import init, load, train
    from distgpt.core.base.files import bundled
    from distgpt.core.config import ModelConfig

__all__ = ["ModelConfig", "__version__", "bundled", "init", "load", "train"]


def __getattr__(name: str) -> Any:
    """Import the library on first use, so that `distgpt --help` stays fast."""
    if name == "ModelConfig":
        from distgpt.core.config import ModelConfig

        return ModelConfig
    if name == "bundled":
        from distgpt.core.base.files import bundled

        return bundled
    if name in ("init", "load", "train"):
        from distgpt import api

        return getattr(api, name)
    raise AttributeError(f"module 'distgpt' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names for completion in notebooks."""
    return __all__
