"""Documents: links resolve, commands work, words are plain, and the site builds without warnings."""

import ast
import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import click
import drawings
import notebook_pages
import numpy as np
import pytest
from distgpt.commands.cli import cli
from run import DOCUMENTS, ROOT, Failed, blocks, main, run

from conftest import for_shells

PAGES = sorted({*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")})
FENCED = re.compile(r"^```.*?^```|`[^`\n]+`", re.DOTALL | re.MULTILINE)
PAGE = """<!-- not run: x -->
```bash
false
```
<!-- run with: runs --help; a-b c -->
```sh
distgpt runs
false | cat
```
"""
COMMAND = re.compile(r"^(?:[^#\n]*(?:mpirun|[|&]) [^#\n]*)?distgpt ([a-z].*)", re.MULTILINE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAME = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)*)`")  # a name in code
PATH = re.compile(r"`([\w-]+(?:/[\w.-]+)*(?:\.(?:py|cu|cuh|md|cpp|c|sh)|/))`")
TREES = ("distgpt", "tests", "benchmarks", "docs", "examples")
NOT_OURS = {"ProcessPoolExecutor", "cs", "st", "json", "jsonl", "safetensors", "txt"}
ABOUT_CODE = (
    "architecture", "read-in-an-hour", "matmul", "seams", "performance", "scale", "torture",
)  # fmt: skip


def slugs(page):
    for heading in re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", heading.lower()).strip()
        yield from (words.replace(" ", "-"), re.sub(r"[\s-]+", "-", words))


def test_links_resolve_to_files_and_headings():
    for page in PAGES:
        for link in LINK.findall(FENCED.sub("", page.read_text())):
            if "://" not in link:
                path, _, anchor = link.partition("#")
                target = (page.parent / path).resolve() if path else page
                assert target.exists(), f"{page.name}: {link}"
                assert not anchor or anchor in slugs(target), f"{page.name}: {link}"


def commands(text):
    for script in re.findall(r"^```(?:bash)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in re.findall(COMMAND, script.replace("\\\n", "")):
            with contextlib.suppress(ValueError):  # a drawing or output
                yield shlex.split(re.split(r" [|>&;]|&&|; |\)$", line)[0], comments=True)


def test_documented_commands_and_options_exist():
    seen = set()
    for page in PAGES:
        for words in commands(page.read_text()):
            found, path, rest = cli, "distgpt", list(words)
            while isinstance(found, click.Group) and rest:
                path, found = f"{path} {rest[0]}", found.get_command(click.Context(found), rest.pop(0))
            assert isinstance(found, click.Command), f"{page.name}: {path}"
            flags = {flag for p in found.get_params(click.Context(found)) for flag in (*p.opts, *p.secondary_opts)}
            own = rest[: rest.index("--")] if "--" in rest else rest
            wrong = {word.partition("=")[0] for word in own if word[:2] == "--"} - flags
            of_sbatch = {"--partition", "--account", "--array", "--mem"}
            wrong -= of_sbatch if path == "distgpt submit" else set()
            assert not wrong, f"{page.name}: {path} has no {wrong}"
            seen.add(path)
    assert {"distgpt train", "distgpt weights import", "distgpt submit"} <= seen


@pytest.mark.ci
def test_run_finds_blocks_and_failures(tmp_path):
    for document in DOCUMENTS:
        assert any(not block.skipped for block in blocks(document.read_text())), document
    page, scratch = tmp_path / "page.md", tmp_path / "scratch"
    page.write_text(PAGE)
    scratch.mkdir()
    skipped, failing = blocks(PAGE)
    assert (skipped.skipped, skipped.line, failing.skipped) == ("x", 3, "")
    assert failing.more == {"MORE_RUNS": "--help", "MORE_A_B": "c"}
    with pytest.raises(Failed, match=r"page\.md:7: left with 1[\s\S]*List the runs"):
        run(page, scratch)
    page.write_text("```bash\necho hello 1\n```\n\nIt answers:\n\n```text\nbye 2\n```\n")
    shutil.rmtree(scratch / ".bin"), shutil.rmtree(scratch / "texts")
    with pytest.raises(Failed, match="no longer prints"):
        run(page, scratch)


def test_documented_files_and_names_exist():
    paths = [*ROOT.glob("*"), *(path for name in TREES for path in (ROOT / name).rglob("*"))]
    paths = [path for path in paths if "__pycache__" not in path.parts]
    known = {f"/{path.relative_to(ROOT)}{'/' * path.is_dir()}" for path in paths}
    texts = (path.read_text() for path in paths if path.suffix in (".py", ".cu", ".cuh", ".c", ".cpp"))
    words = set(re.findall(r"\w+", "".join(texts)))
    for page in (ROOT / "docs" / "explanation" / f"{name}.md" for name in ABOUT_CODE):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for path in PATH.findall(text):
            assert any(name.endswith(f"/{path}") for name in known), f"{page.name}: {path}"
        for name in {name for name in NAME.findall(text) if not PATH.match(f"`{name}`")}:
            assert set(name.split(".")) <= words | NOT_OURS, f"{page.name}: {name}"


@pytest.mark.ci
def test_documented_errors_match_the_package():
    """At least 40% of each error is in strings of the package; the rest is names and numbers."""
    trees = (ast.walk(ast.parse(path.read_text())) for path in (ROOT / "distgpt").rglob("*.py"))
    texts = (node.value for tree in trees for node in tree if isinstance(node, ast.Constant))
    parts = {text.strip() for text in texts if isinstance(text, str) and len(text.strip()) > 5}
    shown_in = re.compile(r"^    distgpt: ((?:.+\n)(?:    .+\n)*)", re.MULTILINE)
    shown = [(page, error) for page in PAGES for error in shown_in.findall(page.read_text())]
    for page, error in shown:
        error = re.sub(r"\s+", " ", error)
        found = {at for part in parts for i in [error.find(part)] if i >= 0 for at in range(i, i + len(part))}
        assert 5 * len(found) > 2 * len(error), f"{page.name}: {error}"
    assert len(shown) >= 4


def luminance(color):
    parts = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return sum(share * part for share, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one, other):
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["default", "slate"])
def test_site_colors_have_contrast(scheme):
    """4.5:1 is the limit of WCAG 2.1 AA for text."""
    css = (ROOT / "docs" / "site.css").read_text()
    block = re.search(rf'scheme="{scheme}"\][^{{]*\{{(.*?)\}}', css, re.DOTALL)[1]
    colors = dict(re.findall(r"--md-([\w-]+): (#\w{6});", block))
    header = re.search(r"--md-primary-fg-color: (#\w{6})", css)[1]
    assert contrast("#ffffff", header) > 4.5
    for name, color in colors.items():
        if not name.endswith("bg-color"):
            for ground in [colors["default-bg-color"], colors["code-bg-color"]]:
                assert contrast(color, ground) > 4.5, f"{name} on {ground}: {contrast(color, ground):.2f}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "document", [pytest.param(path, id=path.stem, marks=pytest.mark.xdist_group(path.stem)) for path in DOCUMENTS]
)
def test_readme_and_tutorials_run(document):
    assert main([document], for_shells()) == 0


@pytest.mark.slow
def test_site_builds_without_warnings(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    here = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=here)
    assert result.returncode == 0, result.stderr
    notebook = (tmp_path / "notebooks" / "look-inside.html").read_text()
    assert "look-inside-1.png" in notebook and (tmp_path / "notebooks" / "look-inside-1.png").is_file()
    page = (tmp_path / "reference" / "commands.html").read_text()
    assert "--grad-sync" in page and "distgpt weights quantize" in page and "generated:" not in page


@pytest.mark.ci
def test_drawings_match_the_code():
    for name, draw in drawings.DRAWINGS.items():
        there = (drawings.IMAGES / f"{name}.svg").read_text()
        assert draw().svg() == there, f"{name}.svg is no longer true: python docs/drawings.py"


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


def cells(notebook):
    return json.loads(notebook.read_text())["cells"]


def executed(notebook):
    """Run a notebook's code in one namespace and return the namespace."""
    names = {"__name__": "__main__"}
    for number, cell in enumerate(cells(notebook), 1):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{notebook.name}, cell {number}", "exec"), names)
    return names


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    import matplotlib.pyplot as plt  # a global import would slow down test collection

    monkeypatch.chdir(tmp_path)
    before = plt.get_backend()
    plt.switch_backend("agg")
    yield tmp_path
    plt.close("all")
    plt.switch_backend(before)


@pytest.mark.ci
def test_first_model_learns_and_resumes(scratch, capsys):
    found = executed(ROOT / "docs" / "notebooks" / "first-model.ipynb")
    assert re.findall(r"^step (\d+): loss \d", capsys.readouterr().out, re.M) == [*map(str, range(25, 201, 25))]
    losses = [line["loss"] for line in found["training"]]
    assert losses[-1] < 3 < 5 < losses[0] and len(found["held_out"]) == 4
    assert found["more"].metrics[-1]["step"] == 200 and (scratch / "runs" / "notebook").is_dir()


def test_look_inside_checks_gradient(scratch):
    found = executed(ROOT / "docs" / "notebooks" / "look-inside.ipynb")
    assert found["figure"].axes and np.isclose(found["chances"].sum(), 1)
    assert found["quotient"] == pytest.approx(found["gradient"][found["place"]], rel=1e-5)


@pytest.mark.parametrize("notebook", sorted((ROOT / "docs" / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_stores_small_outputs_without_errors(notebook):
    code = [cell for cell in cells(notebook) if cell["cell_type"] == "code"]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert all(cell["execution_count"] for cell in code) and len(outputs) > 3
    assert not any(output["output_type"] == "error" or output.get("name") == "stderr" for output in outputs)
    page, pictures = notebook_pages.convert(notebook)
    assert "```text" in page and ".ipynb)" in page.splitlines()[-1]
    assert pictures and all(content[:4] == b"\x89PNG" and len(content) < 60_000 for content in pictures.values())
    assert not re.search(r"/tmp|/home|/root", page)
