"""What saving GPT-2 124M costs a training run, while training waits and while it goes on.

In one process, in turn: plain steps, and steps from the begin of a save until it is written. A save's cost is
what those took longer than as many plain ones before and after.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np
from record import arguments, end_with_errors, save

from distgpt.core.comm.serial import SerialComm
from distgpt.core.config import RunConfig
from distgpt.core.config.presets import preset
from distgpt.core.cpu.stages import open_stage
from distgpt.core.data.batches import ArrayTokens, Batches
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.optim import AdamW
from distgpt.core.saved.checkpoint import State
from distgpt.core.saved.modelfile import Description
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train.checkpoints import Checkpoints
from distgpt.core.train.sharing import Exchange
from distgpt.core.train.step import Step

LEAST = 4  # steps in each turn


class Trial:
    """A run's steps, and a saver of each kind."""

    def __init__(self, run: RunConfig, folder: Path) -> None:
        model = Model(Architecture(run.model), open_stage("serial").kernels("float32"))
        model.initialise(1)
        optimizer = AdamW(model, run.train)
        description, directory = Description(run, None), RunDirectory(folder)
        self.savers = {
            how: Checkpoints(model, optimizer, directory, description, replace(run.train, save=how), print)
            for how in ("sync", "async")
        }
        ids = np.random.default_rng(1).integers(0, run.model.vocab_size, 1 << 16).astype(np.uint16)
        self._batches = Batches(ArrayTokens(ids), run.model.seq_len, run.train.batch_size, 1)
        self._work = Step(optimizer, SerialComm(), run.train, Exchange())
        self._done = 0

    def plain(self, least: int = LEAST) -> float:
        """Seconds of a step."""
        begun = time.perf_counter()
        for _ in range(least):
            self._step()
        return (time.perf_counter() - begun) / least

    def saving(self, saver: Checkpoints) -> tuple[int, float, float]:
        """Steps until it is written, their seconds, and how long there was no step at first."""
        begun, count = time.perf_counter(), 0
        saver.begin(State(self._done), best=False, checkpoint=True)
        stood = time.perf_counter() - begun
        while count < LEAST or saver.is_writing:
            self._step()
            saver.poll()
            count += 1
        return count, time.perf_counter() - begun, stood

    def _step(self) -> None:
        self._work.launch(self._done, self._batches).wait()
        self._done += 1


def main() -> None:
    folder = {"type": Path, "help": "where to write; the temporary folder if left out"}
    length = {"type": int, "default": 256, "help": "tokens of a step"}
    args = arguments(__doc__, rounds=4, folder=folder, length=length)
    run = preset("gpt2", {"seq_len": args.length, "batch_size": 1})
    run = run.with_values({"grad_accum": 1, "recompute": "mlp", "keep": 1})
    found: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        trial = Trial(run, Path(name))
        trial.plain(2)
        for saver in trial.savers.values():
            trial.saving(saver)  # allocates the copy
        for _ in range(args.rounds):
            for how, saver in trial.savers.items():
                before = trial.plain()
                count, seconds, stood = trial.saving(saver)
                step = (before + trial.plain()) / 2
                found["step_s"].append(step)
                found[f"{how}_stood_still_s"].append(stood)
                found[f"{how}_written_s"].append(saver.seconds or 0.0)
                found[f"{how}_later_by_s"].append(seconds - count * step)
    medians = {key: median(values) for key, values in found.items()}
    for key, value in medians.items():
        print(f"{key:<22}{value:>8.3f}   {' '.join(f'{each:.2f}' for each in found[key])}")
    ratios = {
        key: medians[f"async_{key}"] / medians[f"sync_{key}"] for key in ("stood_still_s", "later_by_s")
    }
    print(
        f"async against sync: stands still {ratios['stood_still_s']:.1%}, later by {ratios['later_by_s']:.1%}"
    )
    save("saving", {"medians": medians, "ratios": ratios, "all": found}, args.out)


if __name__ == "__main__":
    end_with_errors(main)
