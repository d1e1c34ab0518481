"""Compiled kernels on disk: read where nothing changed, made anew where anything did."""

import pytest

from distgpt.gpu import cubins, nvrtc, sources


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder; and a compiler that writes down what it was asked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(nvrtc, "version", lambda: "13.0")
    compiled = []

    def compile_cubin(source, defines, arch):
        compiled.append((source, defines, arch))
        return nvrtc.Compiled(f"code {len(compiled)}".encode(), "")

    monkeypatch.setattr(nvrtc, "compile_cubin", compile_cubin)
    return tmp_path / "distgpt" / "kernels", compiled


def test_what_was_compiled_is_read_the_next_time(cache):
    _, compiled = cache
    assert [cubins.cubin("norm", ("X",), "sm_90") for _ in range(3)] == [b"code 1"] * 3
    assert len(compiled) == 1


@pytest.mark.parametrize("change", ["source", "defines", "arch", "compiler", "text"])
def test_anything_that_decides_what_comes_out_is_compiled_anew(cache, monkeypatch, change):
    assert cubins.cubin("norm", ("X",), "sm_90") == b"code 1"
    args = {"source": "norm", "defines": ("X",), "arch": "sm_90"}
    if change == "compiler":
        monkeypatch.setattr(nvrtc, "version", lambda: "13.1")
    elif change == "text":
        monkeypatch.setattr(sources, "text", lambda source: "another")
    else:
        args[change] = {"source": "loss", "defines": ("X", "Y"), "arch": "sm_80"}[change]
    assert cubins.cubin(*args.values()) == b"code 2"


@pytest.mark.parametrize("damage", [b"", b"short", None])
def test_a_damaged_file_is_compiled_anew_and_replaced(cache, damage):
    folder, compiled = cache
    cubins.cubin("norm", ("X",), "sm_90")
    (file,) = folder.iterdir()
    file.write_bytes(file.read_bytes()[:-1] + b"!" if damage is None else damage)
    assert [cubins.cubin("norm", ("X",), "sm_90") for _ in range(2)] == [b"code 2"] * 2
    assert len(compiled) == 2 and list(folder.iterdir()) == [file]


@pytest.mark.parametrize("what", ["file", "folder"])
def test_without_a_place_to_keep_them_kernels_are_compiled_each_time(cache, what):
    folder, _ = cache
    folder.parent.mkdir(parents=True)
    if what == "file":
        folder.write_text("not a folder")
    else:  # where the file should be; this also stops someone who may write anywhere
        folder.mkdir()
        cubins.cubin("norm", ("X",), "sm_90")
        (file,) = folder.iterdir()
        file.unlink()
        file.mkdir()
    codes = [cubins.cubin("norm", ("X",), "sm_90") for _ in range(2)]
    assert codes == ([b"code 1", b"code 2"] if what == "file" else [b"code 2", b"code 3"])
