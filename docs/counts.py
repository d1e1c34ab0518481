"""Numbers that pages give of the code. In a page: about 2,200<!-- lines: distgpt/core/cpu/matmul -->.

A page reads well as it is. On the site the hook puts today's number; a test keeps the written one near it.
"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
COUNTED = re.compile(r"([\d,]+)<!-- lines: ([\w/.]+) -->")
CODE = {".py", ".cu", ".cuh", ".html", ".js", ".j2"}


def lines(path: str) -> int:
    """Return the lines of code of a file, or of all files in a folder."""
    files = [ROOT / path] if (ROOT / path).is_file() else (ROOT / path).rglob("*")
    return sum(file.read_text().count("\n") for file in files if file.suffix in CODE)


def rounded(number: int) -> str:
    """Return the number to two digits, which a small change of the code leaves true: 49,746 is 50,000."""
    return f"{round(number, 2 - len(str(number))):,}"


def filled(markdown: str) -> str:
    """Return the page with the numbers of today."""
    return COUNTED.sub(lambda found: rounded(lines(found[2])), markdown)
