"""The tables of components: under which name each is asked for, and the import path of its row.

A row is imported when a run asks for it. Whoever adds a tokenizer, a kind of text, a benchmark or first
weights writes one file, and one line here.
"""

from __future__ import annotations

TABLES = {
    # By what a name of weights begins with, before a colon (saved/named.py).
    "weights": {"hub": "distgpt.saved.fetched:fetched_weights"},
    # By the setting init_weights (training/restore.py).
    "first weights": {"bigrams": "distgpt.model.bigrams:PAIRS"},
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
