"""Which exchanges there are."""

EXCHANGES = {"overlapped": "distgpt.parallel.overlapped:make", "sharded": "distgpt.parallel.sharded:make"}
TABLES: dict[str, dict[str, str]] = {"exchanges": EXCHANGES}

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
