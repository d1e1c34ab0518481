"""Train and generate only with the core: python alone.py STAGE OUT STEPS

Imports of other modules of distgpt than `distgpt.core` fail, and no components are installed.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

PACKAGE = Path(__file__).resolve().parents[2] / "distgpt"
SIZE = {"n_layer": 1, "n_head": 2, "n_embd": 16, "seq_len": 16, "batch_size": 4, "data": "story"}
SIZE |= {"tokenizer": "byte", "matmul": "own", "val_fraction": 0.1, "sample_every": 2}


class Refusal:
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name.startswith("distgpt.") and not f"{name}.".startswith("distgpt.core."):
            raise ModuleNotFoundError(f"{name} is outside of the core", name=name)
        return None


def main(stage: str, out: Path, steps: int) -> None:
    from distgpt.core.config.run_request import asked_for
    from distgpt.core.cpu.stages import open_stage
    from distgpt.core.generate.engine import Engine, complete
    from distgpt.core.generate.engine_setup import slots_for
    from distgpt.core.generate.request import Request
    from distgpt.core.saved.modelfile import open_model
    from distgpt.core.train.lines import Lines, Listeners
    from distgpt.core.train.loop import train
    from distgpt.core.train.plan import make_plan
    from distgpt.core.train.setup import open_run

    opened = open_stage(stage, threads=1)
    listener = Listeners(*[Lines()] * (opened.comm.rank == 0))
    resume = "auto" if out.exists() else None
    plan = make_plan(opened, asked_for(SIZE | {"steps": steps}, out=out, resume=resume), listener.noted)
    train(open_run(plan, opened, listener))
    plan.directory.lock.release()
    if opened.comm.rank == 0 and opened.comm.size == 1:
        model, description, _, _ = open_model(opened, out / "weights.safetensors", "float32")
        tokenizer = description.tokenizer
        assert tokenizer is not None
        engine = Engine(slots_for(model, 1), tokenizer)
        print(complete(engine, [Request(tokenizer.encode_prompt("The"), 8, temperature=0.0)])[0][0].text)


if __name__ == "__main__":
    package = ModuleType("distgpt")
    package.__path__ = [str(PACKAGE)]
    sys.modules["distgpt"] = package
    sys.meta_path.insert(0, Refusal())  # type: ignore[arg-type]
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
