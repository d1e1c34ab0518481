"""The wheel, the example scripts, and the recipes of package managers."""

import sys
import tomllib
import zipfile

import pytest
from distgpt.core.base import __version__
from packaging.requirements import Requirement

from conftest import ROOT

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
