"""Tokens per second of tuning SmolLM2-135M's shape beside transformers, on cores in bfloat16, in turn.

    python benchmarks/tuning_beside_transformers.py --peer-python PYTHON [--rows 4] [--chat 128]

Both learn full rows of chats of --chat tokens, of which the second half is the answer. transformers runs a
plain loop with a fused AdamW: its weights in bfloat16 (ours stay in float32), by autocast, or compiled. Its
rows are not masked between chats, as ours are. A ratio is of the fastest steps of each.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any

import numpy as np
from peer_process import PEERS
from record import arguments, end_with_errors, save

from distgpt.core.comm.resources import usable_cores
from distgpt.core.comm.serial import SerialComm
from distgpt.core.config.presets import preset
from distgpt.core.cpu.kernels import Bfloat16Kernels
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.optim import AdamW
from distgpt.core.ops.api import IGNORED
from distgpt.core.train.sharing import Exchange
from distgpt.core.train.step import Step
from distgpt.texts.chats.examples import ExampleBatches, Examples

SHAPE = "smollm2-135m"
MODES = ("bfloat16", "autocast", "compile")


class Ours:
    """Steps of `distgpt tune`, without the files around them."""

    def __init__(self, rows: int, seq_len: int, chat: int, threads: int) -> None:
        more = {"seq_len": seq_len, "batch_size": rows, "grad_accum": 1, "recompute": "mlp"}
        run = preset(SHAPE, {**more, "chats": True, "dtype": "bfloat16", "lr": 1e-3, "weight_decay": 0.0})
        model, random = Model(Architecture(run.model), Bfloat16Kernels(threads)), np.random.default_rng(0)
        model.train()
        for name, values in model.initial(0):
            model.put(name, values)
        starts = np.arange(0, rows * seq_len + 1, chat)
        inputs = random.integers(0, run.model.vocab_size, rows * seq_len)
        targets = np.where(learned(seq_len, chat) * np.ones((rows, 1)) == 1, 7, IGNORED).reshape(-1)
        examples = Examples(inputs.astype(np.uint16), targets.astype(np.int32), starts)
        self.config, self.taken = run.model, 0
        self._batches = ExampleBatches(examples, seq_len, rows, seed=0)
        optimizer, comm = AdamW(model, run.train), SerialComm()
        self._step = Step(optimizer, comm, run.train, Exchange())

    def step(self) -> dict[str, float]:
        began = time.perf_counter()
        loss = self._step.launch(self.taken, self._batches).wait().loss
        self.taken += 1
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        return {"seconds": time.perf_counter() - began, "loss": loss, "peak": peak}


class Theirs:
    """A process of transformers."""

    def __init__(self, python: str, mode: str, ours: Ours, rows: int, chat: int, threads: int) -> None:
        c = ours.config
        shape = {
            "vocab_size": c.vocab_size,
            "hidden_size": c.n_embd,
            "intermediate_size": c.hidden,
            "num_hidden_layers": c.n_layer,
            "num_attention_heads": c.n_head,
            "num_key_value_heads": c.kv_heads,
            "max_position_embeddings": c.seq_len,
            "tie_word_embeddings": c.tied,
        }
        job = {"shape": shape, "mode": mode, "rows": rows, "seq_len": c.seq_len, "threads": threads}
        words = [python, PEERS / "peer_tuning.py", json.dumps({**job, "learned": learned(c.seq_len, chat)})]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(list(map(str, words)), stdin=pipe, stdout=pipe, text=True)

    def step(self) -> dict[str, float]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        found: dict[str, float] = json.loads(self.process.stdout.readline())
        return found


def learned(seq_len: int, chat: int) -> list[int]:
    return [int(place % chat >= chat // 2) for place in range(seq_len)]


def main() -> None:
    given = arguments(
        __doc__,
        rounds=4,
        **{
            "peer-python": {"default": sys.executable, "help": "a Python with transformers"},
            "rows": {"type": int, "default": 4, "help": "sequences of a step"},
            "seq-len": {"type": int, "default": 512, "help": "tokens of a sequence"},
            "chat": {"type": int, "default": 128, "help": "tokens of a chat"},
            "modes": {"default": ",".join(MODES), "help": "how transformers trains"},
        },
    )
    threads, per_step = len(usable_cores()), given.rows * given.seq_len
    ours = Ours(given.rows, given.seq_len, given.chat, threads)
    ours.step()
    found: list[dict[str, Any]] = []
    for mode in given.modes.split(","):
        theirs = Theirs(given.peer_python, mode, ours, given.rows, given.chat, threads)
        theirs.step()
        pairs = [(ours.step(), theirs.step()) for _ in range(given.rounds)]
        theirs.process.kill()
        best = [min(pair[who]["seconds"] for pair in pairs) for who in (0, 1)]
        rates, ratio = [per_step / seconds for seconds in best], best[1] / best[0]
        peaks = [max(pair[who]["peak"] for pair in pairs) for who in (0, 1)]
        about = {"tokens_per_s": rates, "ratio": ratio, "peaks": peaks, "pairs": pairs}
        found.append({"mode": mode, **about})
        print(
            f"{mode}: distgpt {rates[0]:,.0f} tokens/s, transformers {rates[1]:,.0f}: {ratio:.2f} ×;"
            f" peak memory {peaks[0] / 2**30:.2f} and {peaks[1] / 2**30:.2f} GiB",
            flush=True,
        )
    save("tuning", {"shape": SHAPE, "rows": given.rows, "seq_len": given.seq_len, "runs": found}, given.out)


if __name__ == "__main__":
    end_with_errors(main)
