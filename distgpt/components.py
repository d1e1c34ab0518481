"""The table of components: by the name of each optional part, the import path of the code that it needs.

Nothing registers itself, and only what is asked for is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXCHANGE = "distgpt.training.exchange"

# Name → a class like training.placement.Placement.
PLACEMENTS = {
    "sharded": f"{_EXCHANGE}.sharded:ShardedPlacement",
    "local steps": f"{_EXCHANGE}.replicas:LocalPlacement",
}

# Name → a function like training.exchange.choose.plain_micro_batches.
MICRO_BATCHES = {
    "reproducible parts": f"{_EXCHANGE}.reproducible:make",
    "balanced": "distgpt.training.opening.balance:make",
}

# Name, mostly the value of --grad-sync → a function like training.exchange.choose.plain_exchange.
EXCHANGES = {
    "auto": f"{_EXCHANGE}.trial:make",
    "hierarchical": f"{_EXCHANGE}.reductions:make",
    "in parts": f"{_EXCHANGE}.reductions:make",
    "local steps": f"{_EXCHANGE}.replicas:make",
    "overlapped": f"{_EXCHANGE}.overlapped:make",
    "sharded": f"{_EXCHANGE}.sharded:make",
}


def load(path: str) -> Any:
    """Import what a path names, as in "package.module:name"."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
