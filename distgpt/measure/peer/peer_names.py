"""The forward-pass study in PyTorch: the mean loss over names, in batches of equal length or one by one.

python peer_names.py REQUEST.json WEIGHTS.npz NAMES.npz     prints one line of JSON
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # PyTorch's own switch for huge pages, read once, early

import numpy as np
import torch
from memory import keep_freed_memory, peak_memory
from peer_gpt import GPT, Shape, fill
from torch import nn
from turns import timed


def mean_loss(model: GPT, tokens: Any, lengths: Any, most: int, device: torch.device) -> float:
    """In batches of at most `most` names of equal length; waits once, at the end."""
    starts = np.cumsum(lengths) - lengths
    total = torch.zeros((), dtype=torch.float64, device=device)
    for length in np.unique(lengths):
        at = starts[lengths == length, None] + np.arange(length)
        for first in range(0, len(at), most):
            rows = torch.from_numpy(tokens[at[first : first + most]]).to(device, non_blocking=True)
            scores = model.scores(rows[:, :-1])
            total += nn.functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
    return float(total) / (len(tokens) - len(lengths))


def main(request_file: str, weights_file: str, names_file: str) -> None:
    with open(request_file) as file:  # noqa: PTH123
        request = json.load(file)
    keep_freed_memory()  # as our own passes do: the faster way for PyTorch too
    torch.set_num_threads(request["threads"])
    model = GPT(Shape(**request["shape"]), None).eval()
    fill(model, np.load(weights_file))
    model = model.to(getattr(torch, request["dtype"]))
    stored, device = np.load(names_file), torch.device("cpu")
    tokens, lengths = stored["tokens"], stored["lengths"]

    def work(count: int) -> float:
        own = lengths[:count]
        return mean_loss(model, tokens[: own.sum()], own, request["most"], device)

    with torch.inference_mode():
        found = timed(work, len(lengths), request["repeats"], request["patience"])
    print(json.dumps(found | {"peak_memory": [peak_memory()], "threads": torch.get_num_threads()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
