"""How jobs are started: the words of each launcher."""

import sys
from pathlib import Path

import pytest
from conftest import MPIRUN, needs_mpi

from distgpt.errors import UsageError
from distgpt.machine.launchers import find_launcher, own_mpirun


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """A PATH of made-up launchers, of which `mpirun` says that it is Open MPI's."""
    for name in ("mpirun", "srun", "mpiexec.hydra"):
        says = {"mpirun": "mpirun (Open MPI) 5.0.1", "mpiexec.hydra": "HYDRA build details:"}.get(name, "")
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{says}'\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "hosts").write_text("a\nb\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return tmp_path


def test_each_launcher_has_its_words(programs):
    for chosen, hosts, words in (
        ("mpirun", False, ["mpirun", "-n", "3"]),
        ("mpirun", True, ["mpirun", "-n", "3", "--hostfile", "hosts"]),
        ("mpiexec.hydra -iface eth0", True, ["mpiexec.hydra", "-n", "3", "-iface", "eth0", "-f", "hosts"]),
        ("srun --mpi=pmix", False, ["srun", "-n", "3", "--mpi=pmix"]),
    ):
        launcher = find_launcher(chosen, programs / "hosts" if hosts else None)
        command = launcher.command(3, ["distgpt", "train", 7])
        assert command[0] == str(programs / words[0])
        named = [Path(word).name if word.startswith("/") else word for word in command]
        assert named == [*words, "distgpt", "train", "7"]
        assert launcher.shown(3, ["distgpt"]).startswith(f"{words[0]} -n 3 ")


def test_what_cannot_be_is_refused(programs):
    for chosen, hosts, words in (
        ("nosuchrun", None, "--launcher nosuchrun: there is no such program"),
        ("mpirun", "nosuchfile", "there is no such file"),
        ("srun", "hosts", "srun takes its hosts from the allocation"),
        ("", None, "--launcher names no program"),
        (" ", None, "--launcher names no program"),
        ("''", None, "--launcher names no program"),
        ('"srun', None, '--launcher "srun: no closing quotation'),
    ):
        with pytest.raises(UsageError, match=words):
            find_launcher(chosen, hosts and programs / hosts)


def test_no_launcher_at_all(programs, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(UsageError, match="no mpirun was found"):
        find_launcher(None, None)


@needs_mpi
def test_the_mpirun_beside_this_python_comes_first(programs):
    expected = own_mpirun() or str(programs / "mpirun")
    assert find_launcher(None, None).words == (expected,)
    assert MPIRUN
