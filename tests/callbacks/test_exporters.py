"""Prometheus metrics of a training run in a file and on a port, read by Prometheus' parser."""

import importlib
import io
import json
import re
import socket
import sys
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest
from distgpt.callbacks import exporter
from distgpt.callbacks.exporter import Exporter, Port, Textfile, parsed_address
from distgpt.callbacks.structured import JsonLines, as_json
from distgpt.core.base.errors import StorageError, UsageError
from distgpt.core.base.interrupts import Interrupted
from distgpt.core.comm import job
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from conftest import SMALL, inside, succeeded


def parsed(text):
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.type in ("gauge", "counter", "histogram")
        for sample in family.samples:
            values = found.setdefault(sample.name, {})
            key = tuple(sorted(sample.labels.items()))
            assert key not in values
            values[key] = sample.value
    return found


def value(page, name):
    (found,) = parsed(page)[f"distgpt_train_{name}"].values()
    return found


def started(run, directory, **facts):
    run.started({"directory": str(directory), "stage": "mpi", "ranks": 4, "steps": 100, **facts})
    return run


def step(number, **more):
    return {"step": number, "loss": 2.5, "tokens": 64 * number, "step_s": 0.5, "time": 9.0, **more}


def test_exporter_page_has_step_and_evaluation_values(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    run = started(Exporter(), tmp_path / 'a "run"\\\nof mine')
    run.stepped(step(3, grad_norm=float("inf"), memory_mb=12, skipped=1))
    run.evaluated({"step": 3, "time": 8.0, "val_loss": 3.5})
    run.stepped(step(4, loss=float("nan"), watts=3.25, **{"top-k": 1}))  # added by another callback
    page = generate_latest(run).decode()
    assert value(page, "step") == 4 and value(page, "last_step") == 100 and value(page, "tokens_total") == 256
    assert value(page, "validation_loss") == 3.5 and value(page, "skipped_steps_total") == 1
    assert value(page, "step_timestamp_seconds") == 9 and value(page, "running") == 1
    assert value(page, "loss") != value(page, "loss")  # NaN
    assert value(page, "watts") == 3.25 and value(page, "top_k") == 1
    names = parsed(page)
    assert "distgpt_train_gradient_norm" not in names  # step 4 had none
    assert "distgpt_train_exit_code" not in names and "distgpt_train_checkpoint_timestamp_seconds" not in names
    ((about, _),) = names["distgpt_train_info"].items()
    assert dict(about)["run"] == str(tmp_path / 'a "run"\\\nof mine')
    assert dict(about)["job"] == "77" and dict(about)["ranks"] == "4"


def test_exporter_names_missing_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    monkeypatch.delitem(sys.modules, "distgpt.callbacks.exporter")
    with pytest.raises(UsageError, match=re.escape("pip install 'distgpt[prometheus]'")):
        importlib.import_module("distgpt.callbacks.exporter")


@pytest.mark.parametrize(
    ("error", "code"), [(None, 0), (Interrupted(10), 75), (StorageError(""), 74), (ValueError(), 70)]
)
def test_textfile_ends_with_exit_code(tmp_path, error, code):
    run = started(Textfile(tmp_path), tmp_path / "run")
    run.stepped(step(1))  # too soon after the first version
    (path,) = tmp_path.glob("*.prom")
    assert value(path.read_text(), "running") == 1 and "distgpt_train_loss" not in parsed(path.read_text())
    with suppress(BaseException):
        try:
            if error:
                raise error
        finally:
            run.close()
    run.close()  # a command closes again after handling the error
    page = path.read_text()
    assert (value(page, "running"), value(page, "exit_code"), value(page, "step")) == (0, code, 1)
    assert [*tmp_path.iterdir()] == [path]


def test_textfile_is_replaced_and_reused(tmp_path, monkeypatch):
    first = started(Textfile(tmp_path), tmp_path / "run")
    (path,) = tmp_path.glob("*.prom")
    before = path.stat().st_ino
    monkeypatch.setattr(exporter, "SECONDS_BETWEEN", 0)
    first.stepped(step(1))
    assert path.stat().st_ino != before and value(path.read_text(), "step") == 1
    started(Textfile(tmp_path), tmp_path / "run")
    started(Textfile(tmp_path), tmp_path / "other" / "run")
    assert len([*tmp_path.glob("distgpt-run-*.prom")]) == 2


def test_missing_textfile_directory_is_reported_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(exporter, "SECONDS_BETWEEN", 0)
    folder = tmp_path / "metrics"
    folder.mkdir()
    run = started(Textfile(folder / "mine.prom"), tmp_path)
    (folder / "mine.prom").unlink()
    folder.rmdir()
    run.stepped(step(1))
    run.stepped(step(2))
    folder.mkdir()
    run.stepped(step(3))
    assert capsys.readouterr().err.count("cannot write") == 1
    assert value((folder / "mine.prom").read_text(), "step") == 3


def test_textfile_rejects_names_unread_by_node_exporter(tmp_path):
    for path in (tmp_path / "mine.txt", tmp_path / "missing", tmp_path / "missing" / "mine.prom"):
        with pytest.raises(UsageError, match="--metrics-textfile"):
            Textfile(path)


def test_port_serves_metrics_and_rejects_taken_ports(tmp_path, capsys, monkeypatch):
    run = Port("0")
    host, port = run.server.server_address
    assert host == "127.0.0.1" and f"http://127.0.0.1:{port}/metrics" in capsys.readouterr().out

    def ask(path):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.headers["Content-Type"], answer.read().decode()

    assert ask("/metrics")[1] == ""  # not started yet
    started(run, tmp_path).stepped(step(7))
    kind, page = ask("/metrics")
    assert kind.startswith("text/plain; version=0.0.4") and value(page, "step") == 7
    for wrong in (str(port), "node..a:80"):  # taken; a name that Python cannot encode
        with pytest.raises(UsageError, match=f"--metrics-port {wrong}"):
            Port(wrong)
    # A batch job continues without the port.
    monkeypatch.setenv("PBS_ENVIRONMENT", "PBS_BATCH")
    monkeypatch.setenv("PBS_JOBID", "7.host")
    started(Port(str(port)), tmp_path).stepped(step(8))
    assert f"--metrics-port {port}" in capsys.readouterr().err and value(ask("/metrics")[1], "step") == 7
    run.server.shutdown()
    run.server.server_close()


@pytest.mark.parametrize("sends", [True, False])
def test_slow_client_does_not_block_others(sends):
    run = Port("0")
    where, done = run.server.server_address, threading.Event()

    def trickle(client):
        with suppress(OSError):
            while not done.wait(0.05):
                client.sendall(b"G" * sends)

    with socket.create_connection(where) as client, ThreadPoolExecutor(1) as thread:
        thread.submit(trickle, client)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{where[1]}/metrics", timeout=4) as answer:
                assert answer.status == 200
        finally:
            done.set()
    run.server.shutdown()
    run.server.server_close()


def test_port_accepts_addresses():
    known = {"9200": ("127.0.0.1", 9200), "node7:1": ("node7", 1), "[::]:80": ("::", 80)}
    assert {text: parsed_address(text) for text in known} == known
    for wrong in ("", "node", "99999", "-1", "a:b"):
        with pytest.raises(UsageError, match="--metrics-port"):
            parsed_address(wrong)


def test_run_writes_metrics_and_json_log(tmp_path):
    args = ("--out", "run", "--steps", "6", "--val-fraction", "0.05", "--sample-every", "3", "--threads", "1")
    watched = ("--log-format", "json", "--metrics-textfile", tmp_path, "--metrics-port", "0")
    before = time.time()
    done = succeeded("train", *SMALL, *args, *watched, cwd=tmp_path)
    (path,) = tmp_path.glob("*.prom")
    page = path.read_text()
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-2])
    assert value(page, "step") == 6 and value(page, "exit_code") == 0 and value(page, "loss") == last["loss"]
    assert before < value(page, "checkpoint_timestamp_seconds") < time.time() + 1

    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert all({"time", "level", "host", "rank", "step", "event"} <= each.keys() for each in told)
    events = [each["event"] for each in told]
    others = [name for name in events if name not in ("note", "message", "sample", "step")]
    assert others == ["start", "evaluation", "end"]
    steps = {each["step"]: each["loss"] for each in told if each["event"] == "step"}
    assert 1 in steps and steps[6] == last["loss"]
    assert "+" in told[0]["time"] or told[0]["time"].endswith("Z")
    assert any("weights   run/weights.safetensors" in each.get("message", "") for each in told)
    assert told[-1]["exit_code"] == 0 and not done.stderr
    samples = [each["step"] for each in told if each["event"] == "sample"]
    assert samples == [3, 6, 6], "each sample is one object, also the one after the run"

    again = inside("train", *SMALL, *args, *watched, cwd=tmp_path)
    (end,) = map(json.loads, again.stderr.splitlines())
    assert (end["event"], end["level"], end["exit_code"], again.returncode) == ("end", "error", 2, 2)
    assert "already contains this run" in end["message"]
    assert value(path.read_text(), "exit_code") == 0  # it never started


@pytest.fixture
def written(monkeypatch):
    def run(body, **environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(job, "ignore_further", lambda: None)  # signals of this test
        streams = [io.StringIO(), io.StringIO()]
        monkeypatch.setattr(sys, "stdout", streams[0])
        monkeypatch.setattr(sys, "stderr", streams[1])
        try:
            with as_json():
                body()
        except BaseException as error:
            job.Job().leave(error, None)
        return [[json.loads(line) for line in stream.getvalue().splitlines()] for stream in streams]

    return run


def raising(error):
    def body():
        raise error

    return body


@pytest.mark.parametrize(
    ("error", "code", "level"), [(StorageError("it is full"), 74, "error"), (Interrupted(10), 75, "warning")]
)
def test_json_end_has_exit_code(written, error, code, level):
    said, (end,) = written(raising(error))
    assert not said and (end["event"], end["level"], end["exit_code"]) == ("end", level, code)
    assert end["message"] == str(error)


def test_json_internal_error_has_traceback(written):
    said, (end, *trace) = written(raising(ValueError("x")))
    assert not said and end["exit_code"] == 70 and end["message"] == "rank 0: internal error"[8:]
    assert trace[0]["message"].startswith("Traceback") and trace[-1]["message"] == "ValueError: x"


def test_json_log_writes_whole_lines(written):
    def body():
        pieces, plain = [], sys.stdout.plain
        plain.write = lambda piece: (pieces.append(piece), type(plain).write(plain, piece))
        print("one\n\ntwo", end="")
        print("!", flush=True)
        assert len(pieces) == 2 and all(piece.endswith("}\n") for piece in pieces)  # ranks do not mix
        print("a note\x1b", file=sys.stderr)

    said, notes = written(body, SLURM_JOB_ID="7", SLURM_PROCID="3", SLURM_NTASKS="4", SLURM_STEP_ID="0")
    assert [each["message"] for each in said] == ["one", "two!"]  # rank 0 reports the end
    assert notes[0]["level"] == "warning" and notes[0]["message"] == "a note\x1b"
    assert {each["job"] for each in (*said, *notes)} == {"7"} and {each["rank"] for each in said} == {3}


def test_json_numbers_stay_numbers_and_nan_is_null(written):
    def body():
        lines = JsonLines(3600)
        lines.started({"first_step": 0, "steps": 9, **about})
        lines.stepped({"step": 1, "loss": float("nan"), "lr": 0.5, "time": 3.0})
        lines.stepped({"step": 2, "loss": 1.5})  # not yet
        lines.noted("two\nlines")
        lines.evaluated({"step": 2, "val_loss": 2.5})
        lines.sampled(2, " a text\n")

    about = {"parameters": 1, "vocabulary": 2, "corpus_tokens": 3, "held_out_tokens": 0, "ranks": 1}
    about |= {"stage": "serial", "threads": 2, "directory": "run"}
    (start, step, note, evaluation, sample, end), errors = written(body)
    assert not errors and start["parameters"] == 1 and "1 parameters" in start["message"]
    assert (step["step"], step["loss"], step["lr"]) == (1, None, 0.5) and step["time"].startswith("20")
    assert (note["step"], note["level"], note["message"]) == (2, "notice", "two\nlines")
    assert (evaluation["val_loss"], sample["message"]) == (2.5, "a text")
    assert (end["event"], end["exit_code"]) == ("end", 0)


def test_command_line_mistakes_are_json():
    done = inside("train", "--log-format", "json", "--steps", "many")
    told = [json.loads(line) for line in done.stderr.splitlines()]
    assert done.returncode == 2 and told[-1]["exit_code"] == 2 and "'many'" in told[-1]["message"]
    done = inside("train", "--log-format", "json", "--progress", "live")
    assert "cannot be combined" in json.loads(done.stderr)["message"]
