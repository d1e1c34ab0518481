"""Draw what a command shows on a terminal as an animated SVG: `python docs/screen.py FILE.svg COMMAND...`

docs/images/live.svg shows `distgpt train --val-fraction 0.1 --eval-every 100 --steps 400 --out runs/first`.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import textwrap
import time
from html import escape
from itertools import groupby
from pathlib import Path

COLUMNS, ROWS = 100, 30
SECONDS, FRAMES = 8.0, 24  # duration of the animation, and its frames
ADVANCE, LINE, EDGE, BAR = 7.8, 18, 14, 26  # pixels at a font size of 13
ESCAPES = re.compile(r"\x1b\[[\d;?]*[A-JL-Za-z]")


def record(command: list[str]) -> list[list[str]]:
    """Run the command on a terminal; return its screens, one per change."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, close_fds=True)
    os.close(slave)
    screens, text = [], ""
    while True:
        try:
            data = os.read(master, 1 << 16)
        except OSError:  # Linux reports the end of a terminal this way
            break
        text += data.decode(errors="replace")
        screens.append(screen(text))
        time.sleep(0.02)
    if process.wait():
        raise SystemExit(f"{' '.join(command)} failed\n{text}")
    return screens


def screen(text: str) -> list[str]:
    """Return the lines that the output leaves on a terminal."""
    lines = []
    for line in text.replace("\r\n", "\n").split("\n"):
        kept = ESCAPES.sub("", line.split("\r")[-1].replace("\x1b[K", "")).rstrip()
        lines += textwrap.wrap(kept, COLUMNS) or [""]
    return lines


def svg(command: str, screens: list[list[str]], title: str) -> str:
    """Return the screens as the frames of one picture, whose last frame stays."""
    frames = [[f"$ {command}", *lines] for lines in screens]
    rows = max(map(len, frames))
    width, height = COLUMNS * ADVANCE + 2 * EDGE, BAR + rows * LINE + EDGE
    styles, texts = [], []
    for row in range(rows):
        shown = [frame[row] if row < len(frame) else "" for frame in frames]
        end = 0
        for line, same in groupby(shown):
            begin, end = end, end + len([*same])
            if not line:
                continue
            name = f"r{row}f{begin}"
            place = f'x="{EDGE}" y="{BAR + EDGE + LINE * row:g}"'
            texts.append(f'<text {place} class="{name}">{escape(line, quote=False)}</text>')
            if end - begin < len(frames):
                styles.append(_style(name, begin / len(frames), end / len(frames)))
    dots = "".join(f'<circle cx="{18 + 16 * i}" cy="15" r="5" fill="#5b6b70"/>' for i in range(3))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" role="img"'
        f' aria-label="{escape(title)}" fill="#e6ecee" style="white-space:pre" font-size="13"'
        ' font-family="DejaVu Sans Mono, Menlo, Consolas, monospace">'
    )
    card = '<rect width="100%" height="100%" rx="8" fill="#16211f" stroke="#4a5a57"/>'
    return f"{head}<style>{''.join(styles)}</style>{card}{dots}{''.join(texts)}</svg>\n"


def _style(name: str, begin: float, end: float) -> str:
    """Return the style of a line that is visible from `begin` to `end`, as shares of the animation."""
    last = int(end == 1)
    steps = [(0, int(begin == 0)), (begin, 1), (end, last), (1, last)]
    keys = "".join(f"{at:.2%}{{opacity:{value}}}" for at, value in dict(steps).items())
    return f"@keyframes {name}{{{keys}}}.{name}{{opacity:{last};animation:{name} {SECONDS:g}s step-end}}"


def main(path: str, command: list[str]) -> None:
    screens = record(command)
    first = next((i for i, lines in enumerate(screens) if any(line.startswith("step ") for line in lines)), 0)
    distinct = [lines for lines, _ in groupby(screens[first:])]
    chosen = [distinct[round(i * (len(distinct) - 1) / (FRAMES - 1))] for i in range(FRAMES)]
    words = " ".join(command)
    Path(path).write_text(svg(words, chosen, f"{words}, on a terminal"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
