"""What people get: a wheel with what it needs and nothing else; example scripts that the command prints."""

import sys
import zipfile

import pytest

from conftest import ROOT

sys.path.insert(0, str(ROOT / "examples"))

NEEDED = ("py.typed", "gpu/cu/attention.cu", "gpu/cu/common.cuh", "inference/serving/page.html")
NEEDED += ("bundled/data/corpus.txt", "bundled/weights/sample.safetensors", "bundled/docs/how-to/tuning.md")
NEEDED += ("bundled/docs/reference/files.md", "bundled/docs/explanation/learning.md")
NEEDED += ("bundled/docs/tutorials/your-texts.md",)


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_no_tests(tmp_path):
    wheel = pytest.importorskip("hatchling.builders.wheel")
    [path] = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(path).namelist())
    assert names >= {f"distgpt/{name}" for name in NEEDED}
    code = {str(each.relative_to(ROOT)) for each in (ROOT / "distgpt").rglob("*.py")}
    assert code == {name for name in names if name.endswith(".py")}


def test_example_scripts_are_what_the_command_prints():
    from distgpt.cluster.jobs.systems import SYSTEMS
    from remake import remade, scripts

    asked = ("--requeue", "-r y", "-r", "--time-limit=43200s")  # of systems that queue jobs again, and of Flux
    systems = [row.sentinel for row in SYSTEMS.values()]
    for script in scripts():
        text = script.read_text()
        assert text == remade(script) and "python" not in text, script.name
        options = {line.partition(f"{sign} ")[2] for sign in systems for line in text.splitlines()}
        assert {*asked} & options, script.name
