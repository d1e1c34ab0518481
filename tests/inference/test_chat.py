import io
import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from chattemplates import settings
from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.cpu.stages import open_stage
from distgpt.core.generate.engine import Engine, complete
from distgpt.core.generate.engine_setup import ModelSpec
from distgpt.core.generate.request import Request
from distgpt.corpora.chats.format import ChatFormat
from distgpt.inference.generation.chat import Conversation
from families import write_family
from foreignmodels import MODERN, exported_model, random_model, shape

from conftest import inside, popen

QUICK = ("--max-new-tokens", "8", "--threads", "1")


@pytest.fixture(scope="module")
def loaded():
    return ModelSpec(None, "auto", context=256).load(open_stage("serial", 1))


def conversation(loaded, system="", chat=None, **how):
    request, chat = Request(**{"max_new_tokens": 20, **how}), chat or ChatFormat(loaded.tokenizer)
    return Conversation(loaded.engine(loaded.slots(1, 0)), chat, request, loaded.model.config.seq_len, system)


def said(talk, text):
    forgotten = talk.ask(text)
    return forgotten, "".join(talk.pieces())


def test_answer_matches_engine_on_all_turns(loaded):
    talk = conversation(loaded, "Be brief.", temperature=0.7, seed=5)
    _, first = said(talk, "The harbour")
    _, second = said(talk, "And then?")
    turns = [("system", "Be brief."), ("user", "The harbour"), ("assistant", first), ("user", "And then?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    prompt = ChatFormat(loaded.tokenizer).prompt(messages)
    how = {"temperature": 0.7, "seed": 6, "stop": ("\n\nUser:\n",), "overflow": "stop"}
    anew = Engine(loaded.slots(1, 0), loaded.tokenizer)
    assert complete(anew, [Request(prompt, max_new_tokens=20, **how)])[0][0].text == second
    assert talk.messages == [*messages, {"role": "assistant", "content": second}]
    assert talk.tokens == 20 and talk.prompt == len(prompt)


def test_full_context_drops_oldest_turns(loaded):
    talk, seen = conversation(loaded, "Be brief."), []
    for number in range(8):
        forgotten, _ = said(talk, f"number {number}")
        seen.append(forgotten)
        assert talk.prompt + 20 <= 256 and talk.messages[0]["role"] == "system"
        assert talk.turns[0]["role"] == "user" and talk.turns[-2]["content"] == f"number {number}"
    assert sum(seen) and seen.count(0) > 4 and not any(each % 2 for each in seen)
    assert len(talk.turns) == 16 - sum(seen)


def test_failed_message_leaves_chat_unchanged(loaded, monkeypatch):
    talk = conversation(loaded, chat=(chat := ChatFormat(loaded.tokenizer)))
    said(talk, "The lamp")
    before = list(talk.turns)
    for error, words, text in (
        (UsageError, r"prompt of \d+ tokens, but the context has only 256", "x" * 300),
        (DataError, "not valid UTF-8", "\ud800"),
    ):
        with pytest.raises(error, match=words):
            talk.ask(text)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(chat, "prompt", lambda messages: signal.raise_signal(signal.SIGINT))
        talk.ask("The boats")
    assert talk.turns == before
    talk.ask("The boats")
    pieces = talk.pieces()
    while not next(pieces):
        pass
    pieces.close()
    assert talk.turns[-1]["role"] == "assistant" and talk.turns[-1]["content"] and talk.reason is None
    assert said(talk, "And?")[1]


def piped(text, *words, monkeypatch):
    data = text if isinstance(text, bytes) else text.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    return inside("chat", *QUICK, *words)


def test_pipe_answers_each_line(monkeypatch, tmp_path):
    out = tmp_path / "chat.jsonl"
    lines = f'The harbour\n\n"""one\ntwo"""\nthree\\\nfour\n/system Be brief.\n/save {out}\n/exit\nnever\n'
    found = piped(lines, "--context", "512", "--temperature", "0", monkeypatch=monkeypatch)
    assert found.returncode == 0, found.stderr
    messages = json.loads(out.read_text())["messages"]
    assert [m["content"] for m in messages if m["role"] == "user"] == ["The harbour", "one\ntwo", "three\nfour"]
    assert messages[0] == {"role": "system", "content": "Be brief."}
    answers = [each["content"] for each in messages if each["role"] == "assistant"]
    assert found.stdout == "".join(f"{text}\n" for text in answers)


def test_pipe_reports_error_and_exits(monkeypatch, tmp_path):
    taken = tmp_path / "taken"
    taken.write_text("mine")
    for text, code, message in (
        ("", 2, "standard input has no message"),
        ("\n \n", 2, "has no message"),
        (b"\xff\xfe\n", 65, "standard input, line 1 is not valid UTF-8"),
        ("/frob\n", 2, "/frob"),
        ("/save\n", 2, "requires a file name"),
        (f"/save {taken}\n", 2, "nothing to save yet"),
        (f"hi\n/save {taken}\n", 2, "already exists"),
        (f"hi\n/save {tmp_path}/none/chat\n", 74, "No such file"),
        (f"hi\n/save {'x' * 300}\n", 74, "File name too long"),
        (f"hi\n/save ~nobody{'x' * 20}/chat\n", 74, "cannot write ~nobody"),
        ("x" * 200, 2, "shorten it"),
        ("x" * (2 << 20), 65, "line 1 is longer than 1 MiB"),
    ):
        result = piped(text, monkeypatch=monkeypatch)
        assert result.returncode == code and message in result.stderr.splitlines()[-1], (text[:9], result)
        assert "Traceback" not in result.stderr
    assert taken.read_text() == "mine"
    result = piped("/etc/hosts is a file\n", monkeypatch=monkeypatch)
    assert result.returncode == 0 and result.stdout.endswith("\n")


def read_until(terminal, wanted, seconds=30):
    shown, deadline = b"", time.monotonic() + seconds
    while wanted not in shown:
        assert time.monotonic() < deadline, shown
        shown += os.read(terminal, 1 << 16)
    return shown


@pytest.mark.ci
def test_terminal_chat_survives_interrupts_and_errors(tmp_path):
    random_model(tmp_path / "w.safetensors", shape(256, 60000, 1, 1, 16, **MODERN))
    ours, theirs = pty.openpty()
    words = ("chat", "--weights", tmp_path / "w.safetensors", "--max-new-tokens", "50000", "--threads", "1")
    how = {"stdin": theirs, "stdout": theirs, "stderr": theirs, "env": {"TERM": "dumb"}}
    with popen(*words, cold=True, **how) as process:
        os.close(theirs)
        try:
            read_until(ours, b"> ")
            os.write(ours, b"hello\n")
            read_until(ours, b"hello\r\n")
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            shown = read_until(ours, b"(stopped)\r\n")
            assert b"Traceback" not in shown
            b"> " in shown.partition(b"(stopped)")[2] or read_until(ours, b"> ")
            for text, answer in ((b"/sytem", b"did you mean '/system'"), (b"/save /nowhere/chat", b"/nowhere/chat")):
                os.write(ours, text + b"\n")
                assert answer in read_until(ours, b"\n> ")
            os.write(ours, b"\x04")
            assert process.wait(20) == 0
        finally:
            process.kill()
            os.close(ours)


@pytest.mark.ci
def test_interrupted_pipe_exits():
    words = ("chat", "--context", "60000", "--max-new-tokens", "50000", "--threads", "1")
    how = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with popen(*words, **how) as process:
        process.stdin.write(b"hello\n")
        process.stdin.flush()
        process.stdout.read(1)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
    assert process.returncode == 130


def test_imported_model_uses_its_template(monkeypatch, tmp_path):
    folder, ours = tmp_path / "theirs", tmp_path / "imported.safetensors"
    exported_model(folder, shape(1000, 200, 1, 2, 16, **MODERN), tokenizer=None)
    write_family(folder, "llama3", **settings("llama3"))
    assert inside("weights", "import", folder, "--out", ours).returncode == 0
    found = piped("hi\n", "--weights", ours, "--temperature", "0", monkeypatch=monkeypatch)
    assert found.returncode == 0, found.stderr
    loaded = ModelSpec(ours, "auto").load(open_stage("serial", 1))
    chat = ChatFormat(loaded.tokenizer)
    prompt = chat.prompt([{"role": "user", "content": "hi"}])
    (sample,) = complete(loaded.engine(loaded.slots(1, 0)), [Request(prompt, max_new_tokens=8)])[0]
    assert found.stdout == sample.text + "\n"
    end = sample.tokens[3]
    chat.ends = (end,)
    talk = conversation(loaded, chat=chat, max_new_tokens=8)
    _, text = said(talk, "hi")
    assert text == loaded.tokenizer.decode(sample.tokens[: sample.tokens.index(end)]) and talk.reason == "stop"
