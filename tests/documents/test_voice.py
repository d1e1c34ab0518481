"""Plain English: words and turns of phrase that made pages and messages hard to read stay rare."""

import ast
import re

import pytest
from run import ROOT

# Each with what to write instead.
MARKERS = {
    r"\balone\b(?! time)": "only",
    r"\bbeside\b": "next to, in addition to, compared with",
    r"\banew\b": "again",
    r"\b(?:of|by|from|with|after|in) which\b": "a new sentence",
    r"(?:^|[,;:(] |\b(?:of|in|by|from|with|than|and|or|to|on) )what\b(?! to\b| if\b)": "name the thing",
    r"\bthose\b": "repeat the noun",
    r"\b(?:is|are|as|by|to|than) that of\b": "repeat the noun",
    r"\bwhere (?:that|it|they|there|nothing|none|no|one|some|all|any|a|an|the)\b": "if, when",
    r"\b(?:lies|lie|lay|stands|stand|stood) (?:in|on|at|beside|there|as)\b": "is in, is stored in",
    r"\b(?:goes|go|went|gone) on\b": "continue",
    r"\bof (?:its|their|our) own\b": "its own, separate",
    r"[,;] else\b": "otherwise",
    r"\b(?:nobody|whoever|meanwhile)\b": "name the process or user; in the meantime",
    r"\b(?:is|are|was) no \w+": "is not a",
    r"\b(?:says|told|tells|knows|wants)\b": "prints, reports, has, needs",
    r"\brefus(?:e|es|ed)\b": "reject",
    r"\b(?:the same bits|to the bit|bit for bit)\b": "bitwise identical",
    r"\bleft out\b": "omitted; the default",
}
CODE = re.compile(r"^```.*?^```|`[^`]*`|^ {4}[^\n]*$|\]\([^)]*\)", re.MULTILINE | re.DOTALL)


def pages():
    return "\n".join(CODE.sub("", path.read_text()) for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def strings():
    """Return the sentences in the package: messages, help and docstrings."""
    found = []
    for path in (ROOT / "distgpt").rglob("*.py"):
        nodes = (n.value for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.Constant))
        found += [value for value in nodes if isinstance(value, str) and value.count(" ") > 2]
    return "\n".join(found)


@pytest.mark.parametrize("text", [pages, strings])
def test_dialect_stays_rare(text):
    text = text()
    found = [(m[0], advice) for marker, advice in MARKERS.items() for m in re.finditer(marker, text, re.MULTILINE)]
    rate = 1000 * len(found) / len(text.split())
    assert rate < 4, f"{rate:.1f} per 1,000 words: " + "; ".join(f"{words!r}: {advice}" for words, advice in found)
