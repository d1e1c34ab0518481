"""Tables for the terminal: aligned, as wide as it is, in its characters."""

import sys

from reportpages import LONG_WORD

from distgpt.show.tables import terminal_table


def test_a_table_for_the_terminal_is_aligned():
    rows = [["serial", "41.2 s"], ["mpi, 2 ranks", "9.3 s"], ["名前", "\x1b[31m"], ["[b]short"]]
    assert terminal_table(["stage", "time"], rows).splitlines() == [
        "stage             time",
        "────────────  ────────",
        "serial          41.2 s",
        "mpi, 2 ranks     9.3 s",
        "名前          \\x1b[31m",
        "[b]short",
    ]


def test_a_table_for_the_terminal_wraps_sentences_and_keeps_numbers_whole(monkeypatch):
    why = "no NVIDIA driver was found on this machine: install one that knows the card, then CuPy for it"
    for columns, widest in (("100", 100), ("200", 100), ("40", 60)):
        monkeypatch.setenv("COLUMNS", columns)
        rows = [["cuda", "1,234,567.8", f"{why} {LONG_WORD}"]]
        text = terminal_table(["stage", "memory", "why it did not run"], rows)
        assert max(map(len, text.splitlines())) <= widest
        last_cells = (line.rpartition("  ")[2] for line in text.splitlines()[2:] if "  " in line)
        told = "".join(last_cells).replace(" ", "")
        assert why.replace(" ", "") in told and LONG_WORD in told and "1,234,567.8" in text, text
    assert terminal_table([], []) == ""


def test_a_terminal_without_unicode_gets_plain_characters(monkeypatch):
    class Latin:
        encoding = "latin-1"

    monkeypatch.setattr(sys, "stdout", Latin())
    terminal_table(["a", "b"], [["x", "1"]]).encode("latin-1")
