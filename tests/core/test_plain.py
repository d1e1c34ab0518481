"""What the plainest run loads until its weights change for the first time: nothing that nobody asked for."""

import sys

from conftest import SMALL, distgpt

# Up to its first update a run in a batch job, on a host with counters, or of several ranks has more to load.
LOADED = """
import sys
from pathlib import Path

from distgpt.cli import main
from distgpt.core.train.step import Step

update = Step._update

def seen(*args):
    result = update(*args)
    Path(__file__).with_suffix(".txt").write_text(" ".join(sys.modules))
    return result

Step._update = seen
main()
"""
LATER = {  # who loads it
    "commands.complete": "a shell that completes a line",
    "core.cpu.fused.low_rank": "adapters",
    "core.generate.engine": "--sample-every, and the report of a run that is over",
    "guards.reports": "ranks that have others",
    "guards.retention": "--keep-every, --keep-minutes",
    "launch.leaving": "what ends by an error",
    "layout.placing": "several ranks, or cores that are not alike",
    "layout.plan": "the same",
}
SAID = [*SMALL, "--tokenizer", "byte", "--steps", "1", "--threads", "1", "--progress", "plain"]


def test_the_plainest_run_loads_nothing_that_nobody_asked_for(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(LOADED)
    result = distgpt("train", *SAID, "--out", tmp_path / "run", program=[sys.executable, script])
    assert result.returncode == 0, result.stderr
    loaded = set(script.with_suffix(".txt").read_text().split())
    assert "distgpt.core.train.step" in loaded
    assert not loaded & {f"distgpt.{name}" for name in LATER}
