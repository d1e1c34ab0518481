"""Where shared libraries are found, with libraries of our own in all the places."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from distgpt.gpu import cublaslt, probe

CXX = shutil.which("g++")
needs_compiler = pytest.mark.skipif(CXX is None, reason="needs g++")


def test_a_missing_library_is_none(monkeypatch):
    monkeypatch.setattr(cublaslt, "NAMES", ("libcublasLt.so.0",))
    assert cublaslt.load() is None
    assert probe.library_path(("libcublasLt.so.0",)) is None


@needs_compiler
def test_libraries_come_from_wheels_then_the_toolkit_and_never_twice(tmp_path):
    places = {"wheel": "site/nvidia/cu13/lib", "toolkit": "cuda/lib64", "elsewhere": "elsewhere"}
    for number, folder in enumerate(places.values()):
        place = tmp_path / folder
        place.mkdir(parents=True)
        code = f'extern "C" int which() {{ return {number}; }}'
        flags = ["-shared", "-fPIC", "-Wl,-soname,libprobe.so.1", "-x", "c++", "-"]
        subprocess.run([CXX, *flags, "-o", place / "libprobe.so.1"], input=code, text=True, check=True)

    def which(before="", **environment):
        code = f"import ctypes; {before}\nfrom distgpt.gpu.probe import load_library, library_path\n"
        code += "names = ('libprobe.so.2', 'libprobe.so.1')\nlibrary = load_library(names)\n"
        code += "print(library.which() if library else None, library_path(names))"
        root = Path(__file__).parents[2]
        paths = os.pathsep.join([environment.pop("site", ""), str(root)])
        clean = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**clean, "PYTHONPATH": paths, **environment},
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.split()

    wheel, toolkit, elsewhere = (str(tmp_path / folder / "libprobe.so.1") for folder in places.values())
    site, cuda = str(tmp_path / "site"), str(tmp_path / "cuda")
    assert which() == ["None", "None"]
    assert which(CUDA_HOME=cuda, site=site) == ["0", wheel]
    assert which(CUDA_HOME=cuda) == ["1", toolkit]
    assert which(CUDA_PATH=cuda) == ["1", toolkit]
    anywhere = str(Path(elsewhere).parent)
    assert which(LD_LIBRARY_PATH=anywhere) == ["2", "None"]
    assert which(LD_LIBRARY_PATH=anywhere, CUDA_HOME=cuda, site=site) == ["0", wheel]
    loaded = f"ctypes.CDLL({elsewhere!r})"
    assert which(loaded, CUDA_HOME=cuda, site=site) == ["2", wheel]
