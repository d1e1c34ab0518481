"""The wheel, example scripts, recipes of package managers, the test setup, and the list of mutations."""

import os
import signal
import subprocess
import sys
import tomllib
import zipfile

import pytest
from distgpt.core.base import __version__
from packaging.requirements import Requirement

from conftest import HELPERS, LONG, ROOT, SMALL, TESTS, distgpt, popen, wait_for
from mutations.mutations import MUTATIONS
from mutations.sampling import changed, mutants_of, sample

PACKAGING = ROOT / "packaging"
sys.path[:0] = [str(ROOT / "examples"), str(PACKAGING)]
import recipes

NEEDED = ("py.typed", "gpu/cu/common.cuh", "inference/serving/page.html", "bundled/data/corpus.txt")
NEEDED += ("bundled/weights/sample.safetensors", "bundled/docs/how-to/tuning.md")


@pytest.mark.slow
def test_wheel_contains_only_the_package(tmp_path):
    wheel = pytest.importorskip("hatchling.builders.wheel")
    [path] = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(path).namelist())
    assert names >= {f"distgpt/{name}" for name in NEEDED}
    code = {str(each.relative_to(ROOT)) for each in (ROOT / "distgpt").rglob("*.py")}
    assert code == {name for name in names if name.endswith(".py")}


def test_example_scripts_match_the_command():
    from distgpt.cluster.jobs.systems import SYSTEMS
    from remake import remade, scripts

    asked = ("--requeue", "-r y", "-r", "--time-limit=43200s")  # requeue options, and Flux's limit
    systems = [row.sentinel for row in SYSTEMS.values()]
    for script in scripts():
        text = script.read_text()
        assert text == remade(script) and "python" not in text, script.name
        options = {line.partition(f"{sign} ")[2] for sign in systems for line in text.splitlines()}
        assert {*asked} & options, script.name


def test_recipes_match_pyproject():
    made = recipes.made()
    for path, text in made.items():
        assert (PACKAGING / path).read_text() == text, f"{path} is old: python packaging/recipes.py"
    others = {path for path in PACKAGING.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    kept = {PACKAGING / "recipes.py", PACKAGING / "README.md", *(PACKAGING / "templates").iterdir()}
    assert others - kept == {PACKAGING / path for path in made}, "a recipe of another version is still there"
    assert f"version: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    for name in (Requirement(each).name for each in needed):
        conda, spack = (recipes.CONDA.get(name, name), recipes.SPACK.get(name, name))
        assert f"    - {conda} >=" in made["conda/recipe.yaml"], name
        assert f'depends_on("py-{spack}@' in next(text for path, text in made.items() if "package.py" in path)
        assert name in recipes.EASYBUILD and (name in made["slim.txt"]) == (name not in recipes.LEFT_OUT), name


def test_recipes_name_hash_and_reject_old_modules(tmp_path):
    (tmp_path / "distgpt.tar.gz").write_bytes(b"x")
    made = recipes.made(tmp_path / "distgpt.tar.gz")
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    assert sum(digest in text for text in made.values()) == 2
    with pytest.raises(AssertionError, match=r"numba 0\.62\.0 is too old"):
        recipes.easybuild({"numba": "0.63"})


def test_files_have_unique_names():
    """Test directories are not packages, so pytest collects one of two files with the same name."""
    names = [path.stem for path in TESTS.rglob("test_*.py")]
    assert sorted(set(names)) == sorted(names) and set(LONG) <= set(names)


@pytest.mark.ci
def test_nohup_leaves_children_the_default_sighup(tmp_path):
    (tmp_path / "test_it.py").write_text(
        "import signal, subprocess, sys\n"
        "def test_it():\n"
        "    asked = 'import signal; print(signal.getsignal(signal.SIGHUP) == signal.SIG_DFL)'\n"
        "    assert subprocess.check_output([sys.executable, '-c', asked]) == b'True\\n'\n"
        "    signal.raise_signal(signal.SIGHUP)\n"
    )
    words = [sys.executable, "-m", "pytest", "-q", "-n", "1", "-p", "no:cacheprovider", "-p", "conftest"]
    words += ["--rootdir", tmp_path, tmp_path]
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{TESTS}:{HELPERS}"}
    env.pop("DISTGPT_TEST_TIERS", None)
    done = subprocess.run(["nohup", *words], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.ci
def test_forked_command_matches_cold_start(tmp_path):
    (tmp_path / "text.txt").write_text("one two three four " * 50)
    for args, code in (
        (["train", "--help"], 0),
        (["infer", "--weights", "nothing.safetensors"], 74),
        (["train", *SMALL, "--data", "text.txt", "--steps", "1", "--progress", "plain", "--out", "."], 2),
    ):
        forked, cold = (vars(distgpt(*args, cwd=tmp_path, cold=cold)) | {"args": None} for cold in (False, True))
        assert forked == cold and forked["returncode"] == code
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with popen("infer", "--prompt-file", "/dev/stdin", "--max-new-tokens", "1", **how) as process:
        assert process.communicate("The harbour")[0].startswith("The harbour")
    assert distgpt("estimate", env={"PMI_SIZE": "2"}).returncode == 2


@pytest.mark.ci
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)], ids=["2", "9"])
def test_forked_command_receives_signals(tmp_path, number, code):
    how = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE, "text": True, "start_new_session": True}
    process = popen("train", *SMALL, "--steps", "1000000", "--out", tmp_path / "run", **how)
    wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists() or process.poll() is not None)
    assert os.getsid(process.pid) == process.pid and process.poll() is None
    os.killpg(process.pid, number)
    assert process.communicate(timeout=60)[1].startswith("distgpt: interrupted" if code == 130 else "")
    assert process.returncode == code


def misfit(mutation):
    file = TESTS.parent / "distgpt" / mutation.file
    if not file.exists() or not (TESTS / mutation.tests.split()[0]).exists():
        return "no such file"
    text = file.read_text()
    if text.count(mutation.old) != 1:
        return f"{mutation.old!r} stands there {text.count(mutation.old)} times"
    changed = text.replace(mutation.old, mutation.new)
    if file.suffix == ".py":
        compile(changed, mutation.file, "exec")
    return "nothing changes" if changed == text else ""


def test_mutations_change_one_place_each():
    misfits = [f"{m.fault}: {m.file}: {wrong}" for m in MUTATIONS if (wrong := misfit(m))]
    assert not misfits, "\n".join(misfits)
    assert len({mutation.fault for mutation in MUTATIONS}) == len(MUTATIONS) >= 40


SOURCE = """
def clipped(x, low, high=3):
    if x < low and x is not None:
        return max(low, x)
    print(x + 1)
    return x * 2 if not high else "as it is"
"""
EXPECTED = {
    ("comparison", "x < low", "(x <= low)"),
    ("condition", "x < low and x is not None", "True"),
    ("arguments", "low, x", "x, low"),
    ("statement", "print(x + 1)", "pass"),
    ("return", "return max(low, x)", "return None"),
}


def test_mutants_change_one_place_and_are_stable_under_edits(tmp_path):
    (path := tmp_path / "room" / "file.py").parent.mkdir()
    path.write_text(SOURCE)
    found = mutants_of(path, tmp_path)
    assert {(m.kind, m.old, m.new) for m in found} > EXPECTED
    for mutant in found:
        text = changed(mutant, path.read_bytes())
        assert text != SOURCE and compile(text, "file.py", "exec")
    before = [m.name for m in sample(tmp_path, per_room=5)]
    path.write_text("# ä comment\n" + SOURCE + "\n# another\n")
    assert [m.name for m in sample(tmp_path, per_room=5)] == before and len(before) == 5
