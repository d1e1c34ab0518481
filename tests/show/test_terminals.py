import io
import os
import re
import sys
import time

import pytest
from distgpt.commands.cli import COMMANDS
from distgpt.core.generate.request import Event
from distgpt.core.generate.single import stream
from distgpt.core.train.lines import Lines, Remaining
from distgpt.show import display
from distgpt.show.display import Live
from distgpt.show.page import Table, terminal, terminal_table
from rich.cells import cell_len

from conftest import distgpt, inside

ASCII = {"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def words(text):
    return " ".join(text.split())


def test_command_summaries_are_whole():
    for group in ([], ["data"], ["tokenizer"], ["weights"], ["bench"]):
        wide = words(inside(*group, "--help", env={"COLUMNS": "100"}).stdout.partition("Commands:")[2])
        text = inside(*group, "--help", env={"COLUMNS": "40"}).stdout.partition("Commands:")[2]
        assert words(text) == wide and "..." not in text
    assert all(command in wide for command in ("infer", "allreduce")) and len(COMMANDS) > 8


@pytest.mark.ci
def test_unencodable_characters_become_question_marks():
    result = distgpt("doctor", env=ASCII, cold=True)
    assert result.returncode == 0 and result.stdout.isascii(), result.stdout


FACTS = {"first_step": 0, "threads": 1, "held_out_tokens": 0, "parameters": 1, "vocabulary": 2}
FACTS |= {"corpus_tokens": 3, "stage": "mpi", "ranks": 2, "directory": "runs/x"}
BY_CLOCK = FACTS | {"steps": 777, "seconds": 180.0, "seconds_left": 108.4}


@pytest.mark.parametrize("facts, said", [
    (FACTS | {"steps": 100_000}, ["step 99999/100000", "left --:--"]),
    (BY_CLOCK, ["step 99999", "1:12 of 3:00", "left 1:4"]),
])  # fmt: skip
def test_run_updates_one_line_below_its_notes(monkeypatch, facts, said):
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    for width in (70, 120):
        monkeypatch.setenv("COLUMNS", str(width))
        shown = Live()
        shown.started(facts)
        shown.stepped({"step": 99_999, "loss": 2.5, "tokens_per_s": 267_090.0, "step_s": 900.0})
        *_, line = out.getvalue().split("\r")
        assert all(words in line for words in (*said, "loss 2.5000", "267,090 tokens/s"))
        assert line.startswith("\x1b[J") and len(line) < width + len("\x1b[J")
        shown.noted("a note")
        assert out.getvalue().endswith("\r\x1b[Ja note\n")
        shown.close()


def test_live_line_fits_shrinking_terminal(monkeypatch):
    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    monkeypatch.setattr(display, "SECONDS_IN_PLACE", 0.0)
    shown = Live()
    shown.started(FACTS | {"steps": 9})
    shown.evaluated({"step": 1, "val_loss": 1.72, "val_tokens": 4})
    lines = []
    for width in (80, 60, 40, 20):
        monkeypatch.setenv("COLUMNS", str(width))
        shown.stepped({"step": 2, "loss": 2.5, "tokens_per_s": 267_090.0, "step_s": 900.0})
        lines.append(out.getvalue().rpartition("\r")[2])
    assert lines == [
        "\x1b[Jstep 2/9  loss 2.5000  val 1.7200  267,090 tokens/s  left --:--",
        "\x1b[1A\x1b[Jstep 2/9  loss 2.5000  267,090 tokens/s  left --:--",  # the terminal wrapped the line
        "\x1b[1A\x1b[Jstep 2/9  loss 2.5000  left 1:45:00",
        "\x1b[1A\x1b[Jstep 2/9  loss 2.50",
    ]


def test_plain_lines_count_down(capsys):
    shown = Lines()
    shown.started(BY_CLOCK)
    shown.stepped({"step": 1, "loss": 2.5, "lr": 0.1, "grad_norm": 1.0, "tokens_per_s": 9.0, "step_s": 900.0})
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("step   1  loss 2.5000  ") and line.endswith("1:12 of 3:00  left 1:48")
    more = {"loss": 2.4, "lr": 0.1, "grad_norm": 1.0, "tokens_per_s": 9.0, "step_s": 1.0}
    shown.stepped({"step": 2, "elapsed_s": 73.0, **more})  # too early for a line
    shown.stepped({"step": 3, "elapsed_s": 180.0, **more})  # the last step
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()] == ["3"]


def test_clock_never_shows_negative_time(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    end = Remaining({"steps": 9, "seconds": 7500.0, "seconds_left": 7000.0})
    assert (end.elapsed(), end.left(1, 5.0)) == ("   8:20 of 2:05:00", "left 1:56:40")
    now[0] += 8000
    assert (end.elapsed(), end.left(1, 5.0), end.done(1)) == ("2:05:00 of 2:05:00", "left 0:00", 7500.0)
    whole = Remaining({"steps": 9, "epochs": 3.0, "seconds": 7500.0, "seconds_left": 7000.0})
    assert (whole.left(1, 5.0), whole.left(1, 1000.0)) == ("left 0:40", "left 1:56:40")
    by_steps = Remaining({"steps": 20})
    assert (by_steps.left(0, 0.0), by_steps.left(5, 2.0), by_steps.elapsed()) == ("left --:--", "left 0:30", "")


def test_time_left_appears_at_the_third_step(capsys):
    shown = Lines(seconds=0.0)
    shown.started(FACTS | {"steps": 9})
    for step, seconds in enumerate((300.0, 100.0, 2.0, 2.0), 1):
        metrics = {"step": step, "loss": 2.5, "lr": 0.1, "grad_norm": 1.0, "tokens_per_s": 9.0}
        shown.stepped({**metrics, "step_s": seconds})
    left = [line.split()[-1] for line in capsys.readouterr().out.splitlines()[1:]]
    assert left == ["--:--", "--:--", "0:12", "0:10"]


def events(text, choice=0):
    """Yield a sample's events, one token per character."""
    for i, character in enumerate(text):
        yield Event(0, choice, i, None, character, "length" if i + 1 == len(text) else None)


def test_samples_are_printed_in_order(capsys):
    one, two, three = (list(events(text, i)) for i, text in enumerate(("ab", "cd", "ef")))
    stream("x", [three[0], one[0], two[0], three[1], one[1], two[1]], 3)
    assert capsys.readouterr().out == "--- 1 of 3\nxab\n--- 2 of 3\nxcd\n--- 3 of 3\nxef\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_prompt_progress_is_one_line_on_terminals(monkeypatch, terminal):
    monkeypatch.setattr(sys, "stderr", out := io.StringIO())
    monkeypatch.setattr(out, "isatty", lambda: terminal)
    monkeypatch.setattr(display, "SECONDS_BETWEEN_LINES", 0.0)
    monkeypatch.setattr(display, "SECONDS_IN_PLACE", 0.0)
    shown = display.ItemProgress()
    shown.began(200, 12)
    shown.advanced(13, 40)
    shown.advanced(200, 900)
    shown.close()
    *_, last = re.split("[\r\n]", out.getvalue().strip())
    assert "200 of 200 prompts" in last and "tokens/s" in last
    assert out.getvalue().count("\n") == (1 if terminal else 2)


def test_control_characters_are_replaced_only_on_terminals(monkeypatch):
    text = "\x1b[2J\x07\u202eb"
    for is_terminal, expected in ((True, "a\ufffd[2J\ufffd\ufffdb\n"), (False, "a\x1b[2J\x07\u202eb\n")):
        out = io.StringIO()
        monkeypatch.setattr(out, "isatty", lambda answer=is_terminal: answer, raising=False)
        monkeypatch.setattr(sys, "stdout", out)
        stream("a", events(text), 1)
        assert out.getvalue() == expected


def test_launcher_pipe_counts_as_terminal(monkeypatch, capsys):
    monkeypatch.setenv("PMI_SIZE", "2")
    stream("a", events("\x1b[2J"), 1)
    assert capsys.readouterr().out == "a\ufffd[2J\n"
    Lines().sampled(1, "a\x1b[2J")
    assert "a\ufffd[2J" in capsys.readouterr().out


def test_interrupted_text_ends_its_line(monkeypatch):
    def interrupted():
        yield Event(0, 0, 1, None, "b", None)
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, "stdout", out := io.StringIO())
    with pytest.raises(KeyboardInterrupt):
        stream("a", interrupted(), 1)
    assert out.getvalue() == "ab\n"


def test_table_is_aligned():
    rows = [["serial", "41.2 s"], ["mpi, 2 ranks", "9.3 s"], ["名前", "\x1b[31m"], ["[b]short"]]
    assert terminal_table(["stage", "time"], rows).splitlines() == [
        "stage             time",
        "───────────── ────────",
        "serial          41.2 s",
        "mpi, 2 ranks     9.3 s",
        "名前          \\x1b[31m",
        "[b]short",
    ]
    assert terminal_table([], []) == ""


def test_narrow_table_loses_nothing(monkeypatch):
    head = ["stage", "memory", "why"]
    row = ["cuda", "1,234", "no NVIDIA driver was found: install one that knows the card, then CuPy for it"]
    for columns in (20, 40, 60, 100, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        lines = terminal_table(head, [row]).splitlines()
        assert max(map(cell_len, lines)) <= min(columns, 100), (columns, lines)
        letters = "".join("".join(lines).split()).replace("─", "")
        assert sorted(letters) == sorted("".join([*head, *row]).replace(" ", "")), columns


def test_piped_table_has_any_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("distgpt.show.page.get_terminal_size", os.terminal_size)  # the size of a pipe
    row = [f"{number:,}" for number in range(10**6, 10**6 + 20)]
    (line,) = terminal_table(["c"] * 20, [row]).splitlines()[2:]
    assert line.split() == row


def test_terminal_prints_tables_and_text():
    table = Table(["a", "b <x>"], [["1 & 2", "</td>"]], 'the "caption"', "the note")
    shown = terminal([table, Table(["none"], []), "equal"])
    assert shown.startswith('the "caption"\na') and shown.endswith("\n\nthe note\n\nequal") and "none" not in shown
