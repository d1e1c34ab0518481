"""Some fuzzing: every loader meets damaged files by the commands of users (tests/fuzz/run.py)."""

import json
import re
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
from fuzz import mutate

RUN = Path(__file__).parent / "fuzz" / "run.py"


def test_every_kind_of_file_can_be_damaged_in_every_way():
    """Here without a loader: the fuzzer's own faults are not only found by its slow test."""
    texts = {"config": "[model]\nn_layer = 1\n", "tokenizer": '{"kind": "byte"}'}
    header = json.dumps({"__metadata__": texts, "w": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]}})
    tensors = len(header).to_bytes(8, "little") + header.encode() + bytes(32)
    whole = {"json": b'{"a": [1, "b"]}', "jsonl": b'{"a": 1}\n{"a": 2}\n', "toml": b"[model]\nn_layer = 1\n"}
    for kind in mutate.KINDS:
        content = whole.get(kind, tensors if "tensors" in kind else b"a text of words\n")
        for seed in range(200):
            assert isinstance(mutate.damaged(content, kind, Random(f"{kind}/{seed}")), bytes), (kind, seed)


@pytest.mark.slow
def test_no_damaged_file_hurts():
    words = [sys.executable, str(RUN), "--cases", "1000", "--seconds", "15"]  # and twice as long to begin
    done = subprocess.run(words, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    cases = int(re.search(r"(\d+) cases, 0 failures", done.stdout)[1])
    assert cases >= 50, "the targets were hardly reached"
