"""Numbers of lines of code in pages. Syntax: about 2,200<!-- lines: distgpt/core/cpu/matmul -->.

The site shows the current number; a test checks that the written one is close.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
COUNTED = re.compile(r"([\d,]+)<!-- lines: ([\w/.]+) -->")
CODE = {".py", ".cu", ".cuh", ".html", ".js", ".j2"}


def lines(path: str) -> int:
    """Return the lines of code of a file or directory."""
    files = [ROOT / path] if (ROOT / path).is_file() else (ROOT / path).rglob("*")
    return sum(file.read_text().count("\n") for file in files if file.suffix in CODE)


def rounded(number: int) -> str:
    """Return the number with two significant digits: 49,746 becomes 50,000."""
    return f"{round(number, 2 - len(str(number))):,}"


def filled(markdown: str) -> str:
    """Return the page with current numbers."""
    return COUNTED.sub(lambda found: rounded(lines(found[2])), markdown)
