"""The screen of a training run: `python docs/live_screen.py` trains and writes docs/images/train.svg.

Its speed is this machine's, so run it while nothing else does.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
import time
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme
from rich.text import Text

COLUMNS = 84
IMAGE = Path(__file__).parent / "images" / "train.svg"
COMMAND = "distgpt train --val-fraction 0.1 --eval-every 50 --out runs/first"
STEP = "step 372/"  # at which the picture is taken
PALETTE = TerminalTheme((27, 32, 38), (228, 232, 236), [(127, 178, 240)] * 8)


def screen() -> str:
    """Return what a terminal shows of the command at STEP."""
    master, slave = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(COLUMNS), "TERM": "xterm"}
    words = [str(Path(sys.executable).parent / "distgpt"), *COMMAND.split()[1:]]
    shown = ""
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.Popen(words, cwd=folder, env=environment, stdout=slave, stderr=slave)
        while STEP not in shown and run.poll() is None:
            shown += os.read(master, 1 << 16).decode(errors="replace")
            time.sleep(0.05)
        run.terminate()
        run.wait()
    return re.sub(r"[^\n]*\r\x1b\[J", "", shown.replace("\r\n", "\n"))


def main() -> None:
    text = Text.from_markup(f"[bold blue]$[/] [bold]{COMMAND}[/]\n").append(screen().rstrip())
    console = Console(record=True, width=COLUMNS, file=StringIO(), force_terminal=True)
    console.print(text, soft_wrap=True)
    svg = console.export_svg(title="", theme=PALETTE)
    IMAGE.write_text(re.sub(r"@font-face \{.*?\}", "", svg, flags=re.DOTALL))  # no fonts from the network


if __name__ == "__main__":
    main()
