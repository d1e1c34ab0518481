"""What people get: a wheel with what it needs and nothing else; example scripts that the command prints."""

import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples" / "slurm"))

NEEDED = ("py.typed", "gpu/cu/attention.cu", "gpu/cu/common.cuh", "serving/page.html", "show/page.html.j2")
NEEDED += ("bundled/data/corpus.txt", "bundled/weights/sample.safetensors", "bundled/docs/how-to/chats.md")
NEEDED += ("bundled/docs/tutorials/your-texts.md",)


@pytest.mark.slow
def test_the_wheel_holds_the_package_and_no_tests(tmp_path):
    wheel = pytest.importorskip("hatchling.builders.wheel")
    [path] = wheel.WheelBuilder(str(ROOT)).build(directory=str(tmp_path), versions=["standard"])
    names = set(zipfile.ZipFile(path).namelist())
    assert names >= {f"distgpt/{name}" for name in NEEDED}
    code = {str(each.relative_to(ROOT)) for each in (ROOT / "distgpt").rglob("*.py")}
    assert code == {name for name in names if name.endswith(".py")}


@pytest.mark.slow
def test_example_scripts_are_what_the_command_prints():
    from remake import HERE, remade

    for script in sorted(HERE.glob("*.sbatch")):
        assert script.read_text() == remade(script), script.name
        assert "python" not in script.read_text() and "\n#SBATCH --requeue\n" in script.read_text()
