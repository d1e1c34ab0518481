"""The table of components: by the name of each optional part, the import path of the code that it needs.

Nothing registers itself, and only what is asked for is imported.
"""

from __future__ import annotations

_EXCHANGE = "distgpt.training.exchange"

# Tables of which the core has the plain rows (tables.py). Whoever adds a tokenizer, a kind of text, a
# benchmark or first weights writes one file, and one line here.
TABLES = {
    # By what a name of weights begins with, before a colon (saved/named.py).
    "weights": {"hub": "distgpt.saved.fetched:fetched_weights"},
    # By the setting init_weights (training/restore.py).
    "first weights": {"bigrams": "distgpt.model.bigrams:PAIRS"},
    # By a component's name, which settings give (training/opening/compatibility.py).
    "checks": {
        "balance": "distgpt.training.opening.balance:check",
        "chats": "distgpt.data.chats.examples:check",
        "hierarchical": f"{_EXCHANGE}.choose:check_hierarchical",
        "local steps": f"{_EXCHANGE}.local_steps:check",
        "lora": "distgpt.training.opening.adapter_kind:check",
        "reproducible": f"{_EXCHANGE}.reproducible:check",
    },
    # By the kind that settings give (training/opening/model_kind.py).
    "models": {"adapters": "distgpt.training.opening.adapter_kind:ADAPTERS"},
    # By the kind in its saved form, and by what --tokenizer begins with (data/tokenizers/naming.py).
    "tokenizers": {
        "bpe": "distgpt.data.tokenizers.learn:BPE",
        "gpt2": "distgpt.data.tokenizers.foreign:GPT2",
        "hub": "distgpt.data.tokenizers.foreign:HUB",
        "library": "distgpt.data.tokenizers.foreign:LIBRARY",
    },
    # By what it is called in a tokenizer's saved form (data/tokenizers/naming.py).
    "extras": {"chat": "distgpt.data.tokenizers.chat_template:checked_chat"},
    # By the setting that names its file (evaluation/assessment.py).
    "metrics": {"hellaswag": "distgpt.evaluation.benchmark:HellaSwag"},
    # By the name that a setting has for it, or by how names of files end; "/" is a folder (data/loading.py).
    "texts": {
        "chats": "distgpt.data.chats.examples:CHATS",
        "packing": "distgpt.data.packing:PACKED",
        **dict.fromkeys((".jsonl", ".parquet", ".gz", "/"), "distgpt.data.prepare.tokenized:DOCUMENTS"),
    },
}

# Name → a class derived from training.placement.Placement.
PLACEMENTS = {
    "sharded": f"{_EXCHANGE}.sharded:ShardedPlacement",
    "local steps": f"{_EXCHANGE}.replicas:LocalPlacement",
}

# Name → a function of the type training.exchange.choose.MakeMicroBatches.
MICRO_BATCHES = {
    "reproducible parts": f"{_EXCHANGE}.reproducible:make",
    "balanced": "distgpt.training.opening.balance:make",
}

# Name, mostly the value of --grad-sync → a function of the type training.exchange.choose.MakeExchange.
EXCHANGES = {
    "auto": f"{_EXCHANGE}.trial:make",
    "hierarchical": f"{_EXCHANGE}.reductions:make",
    "in parts": f"{_EXCHANGE}.reductions:make",
    "local steps": f"{_EXCHANGE}.replicas:make",
    "overlapped": f"{_EXCHANGE}.overlapped:make",
    "sharded": f"{_EXCHANGE}.sharded:make",
}
