"""What the plainest run loads and calls until its weights change for the first time: what was asked for."""

import sys

import pytest
from test_floors import MODULES, PACKAGE

from conftest import SMALL, distgpt

# Up to its first update a run in a batch job, on a host with counters, or of several ranks has more to load.
LOADED = """
import inspect
import sys
from pathlib import Path

from distgpt.commands.cli import main
from distgpt.core.train.step import Step

update, ran = Step._update, set()

def note(frame, event, arg):
    if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # no module, no class
        ran.add(frame.f_code.co_filename)

def seen(*args):
    result = update(*args)
    sys.setprofile(None)
    Path(__file__).with_suffix(".txt").write_text(" ".join(sys.modules))
    Path(__file__).with_suffix(".ran").write_text("\\n".join(ran))
    return result

Step._update = seen
sys.setprofile(note)
main()
"""
LATER = {  # who loads it
    "core.generate.engine": "--sample-every, and the report of a run that is over",
    "core.train.assessment": "--val, --val-fraction, metrics",
    "parallel.choose": "several ranks",
}
UNUSED = {  # who calls what is in there
    "core/saved/checkpoint.py": "a directory that was there, and what is saved",
    "core/train/resume.py": "--resume",
    "core/train/summary.py": "the end of a run",
}
SAID = [*SMALL, "--tokenizer", "byte", "--steps", "1", "--threads", "1", "--progress", "plain"]


@pytest.mark.ci
def test_the_plainest_run_loads_and_calls_nothing_that_nobody_asked_for(tmp_path):
    assert MODULES.keys() >= LATER.keys() and all((PACKAGE / name).is_file() for name in UNUSED)  # renamed?
    script = tmp_path / "run.py"
    script.write_text(LOADED)
    result = distgpt("train", *SAID, "--out", tmp_path / "run", program=[sys.executable, script])
    assert result.returncode == 0, result.stderr
    loaded = set(script.with_suffix(".txt").read_text().split())
    assert "distgpt.core.train.step" in loaded
    assert not loaded & {f"distgpt.{name}" for name in LATER}
    ran = script.with_suffix(".ran").read_text().split("\n")
    assert str(PACKAGE / "core/train/step.py") in ran
    assert not {name for name in UNUSED if str(PACKAGE / name) in ran}
