"""The table of components: by the name of each optional part, the import path of the code that it needs.

Nothing registers itself, and only what is asked for is imported.
"""

from __future__ import annotations

# Tables of which the core has the plain rows (core/base/tables.py). Whoever adds a tokenizer, a kind of
# text, a benchmark or first weights writes one file, and one line here.
TABLES = {
    # By what a name of weights begins with, before a colon (core/saved/named.py).
    "weights": {"hub": "distgpt.formats.fetched:fetched_weights"},
    # By the setting init_weights (core/train/restore.py).
    "first weights": {"bigrams": "distgpt.recipes.bigrams:PAIRS"},
    # By a component's name, which settings give (core/train/compatibility.py).
    "checks": {
        "balance": "distgpt.parallel.balance:check",
        "chats": "distgpt.texts.chats.examples:check",
        "hierarchical": "distgpt.parallel.choose:check_hierarchical",
        "local steps": "distgpt.parallel.local_steps:check",
        "lora": "distgpt.adapters.adapter_kind:check",
        "reproducible": "distgpt.parallel.reproducible:check",
    },
    # Folders of compiled loops: a change there makes them anew (core/cpu/compiling/disk_cache.py).
    "loops": {"adapters": "adapters/loops", "rounded": "rounded/loops", "processors": "processors"},
    # By the kind that settings give (core/train/seams.py).
    "models": {"adapters": "distgpt.adapters.adapter_kind:ADAPTERS"},
    # By the kind in its saved form, and by what --tokenizer begins with (core/data/tokenizers.py).
    "tokenizers": {
        "bpe": "distgpt.texts.tokenizers.learn:BPE",
        "gpt2": "distgpt.texts.tokenizers.foreign:GPT2",
        "hub": "distgpt.texts.tokenizers.foreign:HUB",
        "library": "distgpt.texts.tokenizers.foreign:LIBRARY",
    },
    # By what it is called in a tokenizer's saved form (core/data/tokenizers.py).
    "extras": {"chat": "distgpt.texts.tokenizers.chat_template:checked_chat"},
    # By the setting that names its file (core/train/assessment.py).
    "metrics": {"hellaswag": "distgpt.evaluation.benchmark:HellaSwag"},
    # By what a setting calls it, or how a file's name ends; "/" is a folder (core/data/loading.py).
    "texts": {
        "chats": "distgpt.texts.chats.examples:CHATS",
        "packing": "distgpt.texts.packing:PACKED",
        **dict.fromkeys((".jsonl", ".parquet", ".gz", "/"), "distgpt.texts.prepare.tokenized:DOCUMENTS"),
    },
}

# Name → a class derived from training.placement.Placement.
PLACEMENTS = {
    "sharded": "distgpt.parallel.sharded:ShardedPlacement",
    "local steps": "distgpt.parallel.replicas:LocalPlacement",
}

# Name → a function of the type training.exchange.choose.MakeMicroBatches.
MICRO_BATCHES = {
    "reproducible parts": "distgpt.parallel.reproducible:make",
    "balanced": "distgpt.parallel.balance:make",
}

# Name, mostly the value of --grad-sync → a function of the type training.exchange.choose.MakeExchange.
EXCHANGES = {
    "auto": "distgpt.parallel.trial:make",
    "hierarchical": "distgpt.parallel.reductions:make",
    "in parts": "distgpt.parallel.reductions:make",
    "local steps": "distgpt.parallel.replicas:make",
    "overlapped": "distgpt.parallel.overlapped:make",
    "sharded": "distgpt.parallel.sharded:make",
}
