"""Narrow terminals, pipes and encodings: nothing is cut that matters, and nobody sees a character too few."""

import io
import os
import re
import sys

import pytest
from conftest import distgpt, inside

from distgpt.cli import COMMANDS
from distgpt.show.display import Live

ASCII = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
MISSING = {
    "what": "CuPy is not installed in this place",
    "remedy": "pip install 'distgpt[cuda13x]', or so",
}


def words(text):
    return " ".join(text.split())


@pytest.mark.parametrize("columns", [40, 60, 100])
def test_summaries_of_commands_are_whole(columns):
    for group in ([], ["data"], ["tokenizer"], ["weights"], ["bench"]):
        wide = words(inside(*group, "--help", env={"COLUMNS": "100"}).stdout.partition("Commands:")[2])
        text = inside(*group, "--help", env={"COLUMNS": str(columns)}).stdout.partition("Commands:")[2]
        assert words(text) == wide and "..." not in text
    assert all(command in wide for command in ("forward", "report")) and len(COMMANDS) > 8


def test_a_narrow_terminal_gets_all_of_doctors_advice(monkeypatch):
    import distgpt.machine.doctor as doctor

    found, _ = doctor.examine()
    found["stages"]["cuda"] = {"runs": False, "missing": [MISSING], "notes": []}
    found["launch"]["mpirun"] = {"path": "/a/long/path/to/an/mpirun/that/no/line/holds", "vendor": "MPICH"}
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", "40")
    doctor.show(found)
    page = out.getvalue()
    assert "…" not in page and all(len(line) <= 40 for line in page.splitlines()), page
    assert "pip install 'distgpt[cuda13x]', or" in page and MISSING["what"] in words(page)
    assert found["launch"]["mpirun"]["path"] in page.replace("\n", "").replace(" ", "")


def test_a_terminal_without_a_character_gets_one_like_it():
    """Of what is ours; a prompt is decoded as the terminal sent it."""
    result = distgpt("doctor", env=ASCII, cold=True)
    assert result.returncode == 0 and result.stdout.isascii() and "?" not in result.stdout, result.stdout


def test_a_prompt_is_decoded_as_the_locale_says():
    text = "naïve café"
    asked = ("infer", "--json", "--max-new-tokens", "0", "--prompt", text)
    for env in (ASCII, {"LC_ALL": "C.UTF-8"}):
        result = distgpt(*asked, env=env, cold=True)
        assert result.returncode == 0 and r"na\u00efve caf\u00e9" in result.stdout, result.stderr


def test_bytes_of_another_encoding_are_decoded_by_it(monkeypatch):
    from distgpt.commands import options

    monkeypatch.setattr(options.locale, "getencoding", lambda: "iso8859-1")
    latin = os.fsdecode("café".encode("latin-1"))
    assert options.Typed().convert(latin, None, None) == "café"
    assert options.Typed().convert(os.fsdecode("café".encode()), None, None) == "café"
    monkeypatch.setattr(options.locale, "getencoding", lambda: "ascii")
    assert options.Typed().convert(latin, None, None) == latin  # refused where it is used


def screen(written):
    """What a terminal shows of it, line by line."""
    lines, at = [""], 0
    for part in re.findall(r"\x1b\[\??[\d;]*[A-Za-z]|[\r\n]|[^\x1b\r\n]+", written):
        if part == "\n":
            at += 1
            lines += [""] * (at == len(lines))
        elif part.endswith("A") and part[0] == "\x1b":
            at -= int(part[2:-1])
        elif part == "\x1b[2K":
            lines[at] = ""
        elif part[0] not in "\x1b\r":
            lines[at] += part
    return lines


@pytest.mark.parametrize("launched", [False, True])
def test_one_bar_is_left_after_an_interruption(monkeypatch, launched):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    facts = {
        "steps": 9,
        "first_step": 0,
        "threads": 1,
        "held_out_tokens": 0,
        "parameters": 1,
        "vocabulary": 2,
    }
    facts |= {"corpus_tokens": 3, "stage": "mpi", "ranks": 2, "directory": "runs/x"}
    shown = Live(launched)
    shown.started(facts)
    shown.stepped({"step": 4, "loss": 2.0, "tokens_per_s": 10.0, "step_s": 0.1})
    try:
        shown._progress.refresh()
        if launched:
            print("^C[mpiexec@host] Sending Ctrl-C to processes as requested\n", file=out)
        raise KeyboardInterrupt
    except KeyboardInterrupt:
        shown.close()
    bars = [line for line in screen(out.getvalue()) if "loss 2.0000" in line]
    assert len(bars) == 1, screen(out.getvalue())


def test_a_models_text_is_harmless_on_a_terminal_and_raw_in_a_pipe(monkeypatch):
    from distgpt.data.tokenizers.naming import load_tokenizer
    from distgpt.infer import _stream

    ids = list("a\x1b[2J\x07\u202eb".encode())
    for terminal, expected in ((True, "a\ufffd[2J\ufffd\ufffdb\n"), (False, "a\x1b[2J\x07\u202eb\n")):
        out = io.StringIO()
        monkeypatch.setattr(out, "isatty", lambda terminal=terminal: terminal, raising=False)
        monkeypatch.setattr(sys, "stdout", out)
        _stream(load_tokenizer("byte"), ids[:3], iter(ids[3:]), True)
        assert out.getvalue() == expected
