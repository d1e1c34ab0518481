"""Bundles: wheels for another Python, wheels packed from an installation, and the script that installs."""

import json
import platform
import subprocess
import sys
from importlib.metadata import Distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from conftest import inside, refused
from packaging.requirements import Requirement
from tokenizing import small

from distgpt.bundling import bundle, wheels
from distgpt.core.config.presets import preset
from distgpt.jobs.nodes import refuse_unready
from distgpt.texts.tokenizers import hub

ROOT = Path(__file__).parents[2]
HERE = {"arm64": "aarch64"}.get(platform.machine(), platform.machine())
OTHER = "x86_64" if HERE == "aarch64" else "aarch64"
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
NEEDS = (
    "numba",
    f"there; platform_machine == '{OTHER}'",
    "later; python_version >= '3.13'",
    "tokenizers",
    "matplotlib",
    "uvicorn; extra == 'serve'",
)


def wheel(folder, name, *requires, tag="py3-none-any", extras=(), python=">=3.11"):
    """Write a small wheel that pip takes, with one module and one command."""
    folder.mkdir(exist_ok=True)
    path, info = folder / f"{name}-1.0-{tag}.whl", f"{name}-1.0.dist-info"
    headers = [f"Requires-Dist: {each}" for each in requires] + [f"Provides-Extra: {each}" for each in extras]
    files = {
        f"{name}.py": f"def main():\n    print('{name}, version 1.0')\n",
        f"{info}/METADATA": "\n".join(
            [
                "Metadata-Version: 2.1",
                f"Name: {name}",
                "Version: 1.0",
                f"Requires-Python: {python}",
                *headers,
                "",
            ]
        ),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: {tag}\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    record = f"{info}/RECORD"
    with ZipFile(path, "w") as archive:
        for inside_it, text in {**files, record: "".join(f"{each},,\n" for each in (*files, record))}.items():
            archive.writestr(inside_it, text)
    return path


@pytest.fixture
def index(tmp_path, monkeypatch):
    """Serve small wheels to pip from a folder, and from nowhere else; return distgpt's own."""
    folder = tmp_path / "index"
    native = f"cp312-cp312-manylinux_2_28_{OTHER}", f"cp{PYTHON.replace('.', '')}-abi3-manylinux_2_17_{HERE}"
    for tag in native:
        wheel(folder, "numba", "numpy", tag=tag)
    wheel(folder, "numba", tag=f"cp312-cp312-manylinux_2_39_{OTHER}")
    for name in ("numpy", "there", "later", "uvicorn", "matplotlib", "huggingface_hub"):
        wheel(folder, name)
    wheel(folder, "tokenizers", "huggingface-hub>=0.1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return wheel(tmp_path / "own", "distgpt", *NEEDS, extras=["serve"])


def collected(own, folder, target, extras=(), slim=False):
    folder.mkdir()
    return {path.name for path in wheels.collect(own, extras, target, folder, slim)}


@pytest.mark.slow  # some calls of pip, as below
def test_wheels_are_those_that_the_target_needs_and_no_others(index, tmp_path):
    found = collected(index, tmp_path / "a", wheels.Target("3.12", OTHER), ["serve"])
    pure = {f"{name}-1.0-py3-none-any.whl" for name in ("distgpt", "numpy", "there", "tokenizers")}
    more = {f"{name}-1.0-py3-none-any.whl" for name in ("huggingface_hub", "matplotlib", "uvicorn")}
    assert found == {*pure, *more, f"numba-1.0-cp312-cp312-manylinux_2_28_{OTHER}.whl"}
    slim = collected(index, tmp_path / "b", wheels.Target("3.12", OTHER), slim=True)
    assert slim == found - more


@pytest.mark.slow
def test_an_unknown_extra_and_a_missing_wheel_are_one_line(index, tmp_path):
    with pytest.raises(wheels.UsageError, match="no extra mpi2"):
        collected(index, tmp_path / "a", wheels.Target("3.12", OTHER), ["mpi2"])
    with pytest.raises(wheels.DistgptError, match=r"pip: .*No matching distribution found for numba"):
        collected(index, tmp_path / "b", wheels.Target("3.13", OTHER))
    with pytest.raises(wheels.UsageError, match=r"needs Python >=3\.11: --python 3\.10"):
        collected(index, tmp_path / "c", wheels.Target("3.10", OTHER))


def test_markers_are_read_for_the_target_not_for_this_python(tmp_path):
    found = wheels.wheels_in(wheel(tmp_path, "distgpt", *NEEDS).parent)
    missing = {
        python: wheels.reached(found, Requirement("distgpt"), wheels.Target(python, OTHER).environment(), ())[
            1
        ]
        for python in ("3.12", "3.13")
    }
    assert set(missing["3.13"]) - set(missing["3.12"]) == {"later"} and "there" in missing["3.12"]


def test_a_wheel_is_packed_from_an_installation_as_it_was(tmp_path):
    original = wheel(tmp_path / "a", "distgpt", "numba")
    with ZipFile(original) as archive:
        archive.extractall(tmp_path / "site")
    info = tmp_path / "site" / "distgpt-1.0.dist-info"
    (info / "INSTALLER").write_text("pip\n")
    added = ["distgpt-1.0.dist-info/INSTALLER", "__pycache__/distgpt.cpython-311.pyc", "../../bin/distgpt"]
    with (info / "RECORD").open("a") as record:
        record.writelines(f"{each},,\n" for each in added)
    (tmp_path / "b").mkdir()
    packed = wheels.repacked(Distribution.at(info), tmp_path / "b")
    with ZipFile(original) as before, ZipFile(packed) as after:
        assert packed.name == original.name and sorted(before.namelist()) == sorted(after.namelist())
        assert before.read("distgpt.py") == after.read("distgpt.py")
        assert b"distgpt.py,sha256=" in after.read("distgpt-1.0.dist-info/RECORD")


def test_a_tokenizer_of_the_installation_needs_no_hub(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    folder = hub.installed("some/model")
    assert folder == tmp_path / "share/distgpt/tokenizers/some/model"
    folder.mkdir(parents=True)
    with pytest.raises(hub.UsageError, match="pip install huggingface_hub"):
        hub.download_tokenizer("some/model")
    vocabulary = {entry: i for i, entry in enumerate(small().vocabulary)}
    (folder / "vocab.json").write_text(json.dumps(vocabulary), encoding="utf-8")
    (folder / "merges.txt").write_text("".join(f"{a} {b}\n" for a, b in small().merges), encoding="utf-8")
    assert hub.download_tokenizer("some/model") == folder / "vocab.json"
    # Nodes see it as they see the installation: a batch script needs no word on the hub's cache.
    assert refuse_unready(preset("tiny", {"tokenizer": "hub:some/model"})) == ""
    (folder / "chat_template.jinja").write_text("{{ x }}")
    lines = []
    assert bundle._copy_tokenizers(["hub:some/model"], tmp_path / "to", lines.append) == ["some/model"]
    assert (tmp_path / "to/some/model/chat_template.jinja").read_text() == "{{ x }}" and not lines


def test_what_a_slim_installation_lacks_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.delitem(sys.modules, "distgpt.show.plot", raising=False)
    refused(
        inside("plot", "run", cwd=tmp_path), 2, "needs matplotlib, which is not installed here: pip install"
    )


def test_words_that_no_bundle_is_made_of(tmp_path):
    (tmp_path / "there").write_text("")
    for words, line in {
        ("--out", "there"): "there is there already",
        ("--out", "new", "--python", "312"): "such as 3.12",
        ("--out", "new", "--tokenizers", "char"): "gpt2 or hub:ORG/NAME",
    }.items():
        refused(inside("bundle", *words, cwd=tmp_path), 2, line)


@pytest.mark.slow
def test_the_script_installs_what_was_locked_and_nothing_else(index, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "own_wheel", lambda folder: index)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    hub.installed("openai-community/gpt2").mkdir(parents=True)
    (hub.installed("openai-community/gpt2") / "vocab.json").write_text("{}")
    out, lines = tmp_path / "a folder", []
    bundle.write(out, wheels.Target(PYTHON, HERE), [], [], True, lines.append)
    script, venv = out / "install.sh", tmp_path / "venv"

    def install(*words, **env):
        there = {"PATH": "/usr/bin:/bin", "PYTHON": sys.executable, **env}
        return subprocess.run(["sh", script, *words], capture_output=True, text=True, env=there)

    done = install(venv)
    assert done.stdout.startswith("distgpt, version 1.0\n") and "@" not in script.read_text()[-300:]
    assert done.stderr == f"installing distgpt {bundle.__version__} into {venv}, which may take a minute\n"
    assert "holds openai-community/gpt2. The" in (out / "README.md").read_text()
    assert "holds no tokenizer" in bundle._about([])
    assert (venv / "share/distgpt/tokenizers/openai-community/gpt2/vocab.json").is_file()
    assert not list(venv.glob("lib/*/site-packages/pip"))
    assert "sh install.sh" in install().stderr and install().returncode == 2
    mine = tmp_path / "mine" / "tests"
    mine.mkdir(parents=True)
    assert "is there already" in install(tmp_path / "mine").stderr and [*mine.parent.iterdir()] == [mine]
    assert "does not run" in install(venv, PYTHON="/bin/false").stderr
    script.write_text(script.read_text().replace(f"on linux_{HERE}", f"on linux_{OTHER}"))
    wrong = install(venv)
    assert wrong.returncode == 2 and f"is for Python {PYTHON} on linux_{OTHER}" in wrong.stderr
    script.write_text(script.read_text().replace(f"on linux_{OTHER}", f"on linux_{HERE}"))
    with ZipFile(out / "wheels" / "numpy-1.0-py3-none-any.whl", "a") as changed:
        changed.writestr("more.py", "")
    damaged = install(tmp_path / "second")
    assert damaged.returncode and "DO NOT MATCH THE HASHES" in damaged.stderr


@pytest.mark.cluster
@pytest.mark.timeout(900)
def test_a_bundle_trains_where_there_is_no_network(tmp_path):
    """Made with a network; it installs and trains in a network namespace that has none. As root."""
    make = [sys.executable, "-m", "distgpt", "bundle", "--slim", "--out", tmp_path / "bundle"]
    subprocess.run(make, check=True, cwd=ROOT)
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHON": sys.executable}
    venv, alone = tmp_path / "venv", ["unshare", "-n"]
    subprocess.run([*alone, "sh", tmp_path / "bundle/install.sh", venv], check=True, env=env)
    train = [*alone, venv / "bin/distgpt", "train", "--steps", "3", "--out", tmp_path / "run"]
    subprocess.run(train, check=True, env=env)
    assert (tmp_path / "run" / "weights.safetensors").is_file()
