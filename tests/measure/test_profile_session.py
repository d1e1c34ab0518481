"""`distgpt profile` and `train --profile` from the first to the last step, and what an interrupt leaves."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from conftest import SMALL, same_signals
from profiling import job

from distgpt.commands.profile import profile
from distgpt.commands.train import train
from distgpt.core.base.errors import StorageError
from distgpt.core.comm.serial import SerialComm
from distgpt.doctor import speed as peaks
from distgpt.measure.profile.session import Session, prepare


@pytest.fixture(autouse=True)
def short_peaks(monkeypatch):
    """Peaks are measured, but not for long."""
    monkeypatch.setattr(peaks, "SECONDS", 0.01)


@pytest.fixture
def interruptible():
    """What is broken off wants no second Ctrl-C; the tests after this one do."""
    with same_signals():
        yield


@pytest.fixture
def session(monkeypatch, interruptible):
    """Of rank 0 of two, which trained alone: it has measured three steps, and no peaks."""
    monkeypatch.setattr("distgpt.measure.profile.session.environment", dict)
    comm, (step, batches) = SerialComm(), job()
    comm.size = 2
    stage = SimpleNamespace(comm=comm, on_gpu=False, name="mpi", threads=1)
    session = Session(stage, step, step.config)
    for number in range(5):
        session.profiler.launch(number, batches).wait()
    return session


def test_one_rank_alone_saves_the_table_first_then_the_profile_and_the_trace(session, tmp_path):
    told = []
    session.salvage(tmp_path, told.append)
    found = json.loads((tmp_path / "profile.json").read_text())
    assert found["interrupted"] and (found["ranks"], found["ranks_told"], found["steps"]) == (2, [0], 3)
    assert found["peaks"] is None and found["of_peak"] is None  # none of all ranks
    own = found["per_rank"][0]["rows"]
    assert found["gflops"] == pytest.approx(sum(row["gflop"] for row in own) / found["step_s"])
    assert "interrupted: rank 0 of 2 alone" in told[0] and "2 ranks" in told[0]
    assert "The part of rank 0:" in told[0] and "The whole step" not in told[0]
    assert json.loads((tmp_path / "trace.json").read_text())["otherData"]["ranks"] == "2"
    (tmp_path / "torn" / "trace.json").mkdir(parents=True)
    for folder, lines in (("torn", 2), ("nowhere", 1)):  # the profile is there, or only the table
        told.clear()
        with pytest.raises(StorageError):
            session.salvage(tmp_path / folder, told.append)
        assert len(told) == lines and "Matmul forward" in told[0], folder
    assert json.loads((tmp_path / "torn" / "profile.json").read_text())["steps"] == 3


def test_without_steps_it_is_said_why_there_is_no_profile(tmp_path, capsys):
    for done, words in ((0, "no step was left"), (1, "3 steps to warm up come first")):
        step, batches = job()
        stage = SimpleNamespace(comm=step.comm, on_gpu=False, name="serial", threads=1)
        session = Session(stage, step, step.config, warm_up=3)
        for number in range(done):
            session.profiler.launch(number, batches).wait()
        session.finish(tmp_path, print)
        assert words in capsys.readouterr().out, done
        assert not list(tmp_path.iterdir()), done


def test_a_folder_that_takes_no_files_is_refused_beforehand(tmp_path):
    prepare(SerialComm(), tmp_path / "new" / "folder")
    assert not list((tmp_path / "new" / "folder").iterdir())
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("/proc")):
        with pytest.raises(StorageError, match=folder.name):
            prepare(SerialComm(), folder)


@pytest.mark.parametrize("command,options", [(profile, []), (train, ["--profile"])])
def test_an_interrupt_at_the_very_end_loses_nothing(command, options, interruptible, tmp_path, monkeypatch):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("distgpt.measure.profile.session.gather_bytes", interrupted)
    config, out = tmp_path / "my.toml", tmp_path / "out"
    config.write_text("steps = 5")
    words = [*SMALL, "--config", str(config), "--out", str(out), *options]
    done = CliRunner().invoke(command, words)
    assert done.exit_code == 1 and "interrupted; " in done.output
    assert json.loads((out / "profile.json").read_text())["steps"] == (3 if options else 10)
    assert ("--steps sets how many are measured" in done.output) is (command is profile)
