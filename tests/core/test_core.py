"""What leads out of the core only becomes less, and the core runs while nothing else can be imported."""

import json
import sys
from pathlib import Path

import pytest
from conftest import SMALL, distgpt, losses, needs_mpi
from core.tree import CORE, KEPT, MODULES, as_counts, found

ALONE = [sys.executable, str(Path(__file__).with_name("alone.py"))]
COMMANDS = "complete help infer model_options options sample train"
# Recipes stand in their order in a file that commands and `api` share.
SHARED = {"__main__", "cli", "api", "components", "recipes.recipes"}
FACE = SHARED | {f"commands.{name}" for name in COMMANDS.split()}
FOLDERS = {name for name, path in MODULES.items() if path.name == "__init__.py"}
NEEDED = Path(__file__).with_name("needed.txt")


def test_what_leads_out_of_the_core_only_becomes_less():
    kept, now = as_counts(KEPT.read_text().splitlines()), as_counts(found())
    more = {name: count for name, count in now.items() if count > kept.get(name, 0)}
    assert not more, f"the core is to be read alone: {more}"
    assert now == kept, "it has become less: python tests/core/tree.py --write keeps that"


def run(folder, names, commands, ranks=0):
    """Run commands with these modules alone, or with all; give what they print, and which were loaded."""
    folder.mkdir()
    asked = json.dumps([names, [list(map(str, command)) for command in commands]])
    result = distgpt(asked, folder, program=ALONE, ranks=ranks, timeout=600)
    assert result.returncode == 0, result.stderr
    return result.stdout, {name for path in folder.iterdir() for name in path.read_text().split()}


def training(out, *words):
    """Train five steps, and resume."""
    plain = ["--threads", "1", "--progress", "plain", "--save-every", "3", "--out", out]
    train = ["train", *SMALL, *words, *plain]
    return [[*train, "--steps", "5"], [*train, "--steps", "8", "--resume", "auto"]]


def generating(weights):
    """Generate by command and from Python."""
    words = ["--prompt", "a", "--max-new-tokens", "8", "--seed", "1"]
    return [["infer", "--weights", weights, *words], ["load", weights]]


def assert_same(run, other):
    assert losses(run) == losses(other) and len(losses(run)) == 8
    assert (run / "weights.safetensors").read_bytes() == (other / "weights.safetensors").read_bytes()


@needs_mpi
@pytest.mark.timeout(900)  # where no loop is compiled yet
def test_the_core_runs_while_nothing_else_can_be_imported(tmp_path):
    """`needed.txt` names what it still cannot do without. That list only becomes shorter, too."""
    needed = set(NEEDED.read_text().split())
    core = sorted({*CORE, *FACE, *FOLDERS, *needed})
    loaded, said = {}, {}
    for name, names in {"alone": core, "whole": None}.items():
        out = tmp_path / name
        words = [*training(out), *generating(out / "weights.safetensors")]
        said[name], loaded[name] = run(tmp_path / f"{name} by one", names, words)
    one = tmp_path / "alone"
    assert_same(one, tmp_path / "whole")
    assert said["alone"].splitlines()[-1] == said["whole"].splitlines()[-1]
    two = tmp_path / "alone on two"
    _, of_ranks = run(tmp_path / "by two", core, training(two, "--stage", "mpi"), ranks=2)
    run(tmp_path / "whole by two", None, training(tmp_path / "whole on two", "--stage", "mpi"), ranks=2)
    assert_same(two, tmp_path / "whole on two")
    spare = needed - loaded["alone"] - of_ranks
    assert not spare, f"strike from {NEEDED.name} what is no longer needed: {spare}"
