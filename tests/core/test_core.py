"""What leads out of the core only becomes less, and the core runs while nothing else can be imported."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from conftest import SMALL, copy_compiled, distgpt, losses, needs_mpi
from core.tree import CORE, KEPT, MODULES, PACKAGE, as_counts, found

from distgpt.core.cpu.compiling import disk_cache

ALONE = [sys.executable, str(Path(__file__).with_name("alone.py"))]
COMMANDS = "complete help infer model_options options settings train watch_options"
# Recipes stand in their order in a file that commands and `api` share.
SHARED = {"__main__", "cli", "api", "components"}
FACE = SHARED | {f"commands.{name}" for name in COMMANDS.split()}
FOLDERS = {name for name, path in MODULES.items() if path.name == "__init__.py"}
NEEDED = Path(__file__).with_name("needed.txt")
# Loops whose machine code the copy takes from the whole, found by the digest of their sources, as they take
# long: kernels/test_helpers.py compiles these. The others it compiles, alone as it is.
GIVEN = {"attention", "attention_backward", "attention_cached"}


def test_what_leads_out_of_the_core_only_becomes_less():
    kept, now = as_counts(KEPT.read_text().splitlines()), as_counts(found())
    more = {name: count for name, count in now.items() if count > kept.get(name, 0)}
    assert not more, f"the core is to be read alone: {more}"
    assert now == kept, "it has become less: python tests/core/tree.py --write keeps that"


def run(folder, names, commands, **how):
    """Run commands with these modules alone, or with all; give what they print, and which were loaded."""
    folder.mkdir()
    asked = json.dumps([names, [list(map(str, command)) for command in commands]])
    result = distgpt(asked, folder, program=ALONE, timeout=600, **how)
    assert result.returncode == 0, result.stderr
    return result.stdout, {name for path in folder.iterdir() for name in path.read_text().split()}


def training(out, *words):
    """Train five steps, and resume."""
    plain = ["--threads", "1", "--progress", "plain", "--save-every", "3", "--out", out]
    own = ["--set", "matmul=own"]  # on any processor: its loops are among those that take long to compile
    train = ["train", *SMALL, "--tokenizer", "byte", *own, *words, *plain]
    return [[*train, "--steps", "5"], [*train, "--steps", "8", "--resume", "auto"]]


def generating(weights):
    """Generate by command and from Python."""
    words = ["--prompt", "a", "--max-new-tokens", "8", "--seed", "1"]
    return [["infer", "--weights", weights, *words], ["load", weights]]


def everything(folder, names=None, **how):
    """Train, resume, also on two ranks, infer, generate; give the runs, a text, and modules loaded."""
    folder.mkdir()
    one, two = folder / "one", folder / "two"
    words = [*training(one), *generating(one / "weights.safetensors")]
    said, loaded = run(folder / "by one", names, words, **how)
    _, of_ranks = run(folder / "by two", names, training(two, "--stage", "mpi"), ranks=2, **how)
    return (one, two), said.splitlines()[-1], loaded | of_ranks


def assert_same(found, expected):
    """Compare losses, weights and the text."""
    for run, other in zip(found[0], expected[0], strict=True):
        assert losses(run) == losses(other) and len(losses(run)) == 8
        assert (run / "weights.safetensors").read_bytes() == (other / "weights.safetensors").read_bytes()
    assert found[1] == expected[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What the whole package does."""
    return everything(tmp_path_factory.mktemp("core") / "whole")


@needs_mpi
@pytest.mark.timeout(900)  # where no loop is compiled yet
def test_the_core_runs_while_nothing_else_can_be_imported(tmp_path, whole):
    """`needed.txt` names what it still cannot do without. That list only becomes shorter, too."""
    needed = set(NEEDED.read_text().split())
    alone = everything(tmp_path / "alone", sorted({*CORE, *FACE, *FOLDERS, *needed}))
    assert_same(alone, whole)
    spare = needed - alone[2]
    assert not spare, f"strike from {NEEDED.name} what is no longer needed: {spare}"


@needs_mpi
@pytest.mark.slow  # compiles its loops
@pytest.mark.timeout(900)
@pytest.mark.skipif(disk_cache.SITE.exists(), reason="distgpt compile was run here")  # so none can be given
def test_a_copy_of_the_core_does_the_same_where_nothing_else_is(tmp_path, whole, monkeypatch):
    copied = {*CORE, *FACE, *NEEDED.read_text().split()}
    copied |= {name.rsplit(".", i)[0] for name in copied for i in range(name.count(".") + 1)} | {""}
    for path in (MODULES[name] for name in copied):
        target = tmp_path / path.relative_to(PACKAGE.parent)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    (tmp_path / "data").symlink_to(PACKAGE.parent / "data")  # the texts that come with it
    with monkeypatch.context() as patched:
        patched.setattr(disk_cache, "PACKAGE", tmp_path / "distgpt")
        name = disk_cache.folder_name.__wrapped__()
    cache = tmp_path / "cache"
    given = copy_compiled(cache, only=GIVEN, folder=name)
    alone = everything(tmp_path / "alone", env={"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(cache)})
    assert_same(alone, whole)
    compiled = {path.name.split("-")[0] for path in (cache / name).glob("*.loop") if path.name not in given}
    assert len(compiled) >= 12 and compiled >= {"products", "forward", "backward"} and not compiled & GIVEN
    assert alone[2] <= copied, "it was not the copy that ran"
