"""The table of components: by the name of each optional part, the import path of the code that it needs.

Nothing registers itself, and only what is asked for is imported.
"""

from __future__ import annotations

# Tables of which the core has the plain rows (core/base/tables.py). Whoever adds a tokenizer, a kind of
# text, a benchmark or first weights writes one file, and one line here.
TABLES: dict[str, dict[str, str]] = {
    # Parts of a run that the core has plain ones of (core/base/tables.py).
    "parts": {
        "helpers": "distgpt.helpers.start:start",
        "record": "distgpt.recorded.record:record",
    },
    # By a feature in LLVM's words (core/cpu/compiling/processor.py).
    "processors": {
        "amx-bf16": "distgpt.processors.permission:AMX",
    },
    # By `Shape.tiles` (core/cpu/matmul/assembled.py).
    "tiles": {
        "amx": "distgpt.processors.amx:module",
        "widened": "distgpt.processors.widening:module",
    },
    "packed rows": {"amx": "distgpt.processors.amx:ROWS"},
    # Name, the value of --grad-sync → a function of the type MakeExchange (parallel/choose.py).
    "exchanges": {
        "overlapped": "distgpt.parallel.overlapped:make",
        "sharded": "distgpt.parallel.sharded:make",
    },
    # Folders of compiled loops: a change there makes them anew (core/cpu/compiling/disk_cache.py).
    "loops": {
        "decoding": "inference/decoding/loops",
        "parallel": "parallel/loops",
        "recorded": "recorded/loops",
        "rounded": "inference/quantized",
        "processors": "processors",
    },
}

# Name → a class derived from Placement (core/train/sharing.py).
PLACEMENTS = {
    "sharded": "distgpt.parallel.sharded:ShardedPlacement",
    "local steps": "distgpt.parallel.replicas:LocalPlacement",
}

# Name → a function of the type MakeMicroBatches (parallel/choose.py).
MICRO_BATCHES = {
    "reproducible parts": "distgpt.parallel.reproducible:make",
    "balanced": "distgpt.parallel.balance:make",
}

# Exchanges that other settings than --grad-sync ask for, by what `choose.exchange_name` calls them.
UNNAMED_EXCHANGES = {
    "in parts": "distgpt.parallel.reductions:make",
    "local steps": "distgpt.parallel.replicas:make",
}
