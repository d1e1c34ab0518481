"""Documents: links lead somewhere, commands work, and the site is built without a warning."""

import ast
import contextlib
import os
import re
import shlex
import subprocess
import sys
from itertools import product

import click
import counts
import drawings
import pytest
from distgpt.commands.cli import cli
from distgpt.core.config import SETTINGS
from distgpt.core.config.presets import PRESETS
from run import DOCUMENTS, ROOT, Failed, blocks, main, not_printed, run

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
RATE = r"(?:(?:new )?tokens|[GT]FLOP|Gop|[GM]B|passes|requests)(?:/s| a second)|times as (?:fast|long)"
SPEED = re.compile(rf"\d[\d,.]* ?(?:million )?(?:{RATE}|% (?:faster|slower)|[mµ]s\b|× as|×(?! ?\d))")
NAME = re.compile(r"`([A-Za-z_]\w*(?:\.\w+)*)`")  # of something in the code
PATH = re.compile(r"`([\w-]+(?:/[\w.-]+)*(?:\.(?:py|cu|cuh|md|cpp|c|sh)|/))`")
BLOCK = re.compile(r"^ *```\w*\n(?s:.*?)^ *```|(?<=\n\n)(?: {4}.*\n)+", re.MULTILINE)  # the latter: indented
COLUMN = 96  # characters of code that docs/site.css shows without scrolling from 1,280 pixels on
TREES = ("distgpt", "tests", "benchmarks", "docs", "examples")
NOT_OURS = {"ProcessPoolExecutor", "cs", "st", "json", "jsonl", "safetensors", "txt"}
ABOUT_CODE = [
    ROOT / "docs" / "explanation" / f"{name}.md"
    for name in (
        *("architecture", "read-in-an-hour", "life-of-a-token", "matmul", "seams"),
        *("performance", "scale", "torture"),
    )
]


def slugs(page):
    """Return the anchors of a page's headings, as both GitHub and the site name them."""
    for heading in re.findall(r"^#+ (.*)$", FENCED.sub("", page.read_text()), re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", heading.lower()).strip()
        yield from (words.replace(" ", "-"), re.sub(r"[\s-]+", "-", words))


def test_every_link_leads_to_a_file_and_its_heading():
    for page in PAGES:
        for link in LINK.findall(FENCED.sub("", page.read_text())):
            if "://" not in link:
                path, _, anchor = link.partition("#")
                target = (page.parent / path).resolve() if path else page
                assert target.exists(), f"{page.name}: {link}"
                assert not anchor or anchor in slugs(target), f"{page.name}: {link}"


def commands(text):
    """Return the words of each distgpt command in the shell blocks of a page."""
    for script in re.findall(r"^```(?:bash)?\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        for line in re.findall(COMMAND, script.replace("\\\n", "")):
            with contextlib.suppress(ValueError):  # a drawing, or output
                yield shlex.split(re.split(r" [|>&;]|&&|; |\)$", line)[0], comments=True)


def test_every_command_in_a_document_exists_and_has_its_options():
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


def test_no_line_of_a_block_is_cut_off_at_the_edge_of_its_column():
    shown = {page: "\n".join(BLOCK.findall(page.read_text())) for page in PAGES}
    assert "distgpt train" in shown[ROOT / "README.md"]
    examples = "\n".join(command.example for command in every_command(cli))  # in reference/commands.md
    assert "distgpt data prepare" in examples
    for where, block in {**shown, "examples": examples}.items():
        for line in block.splitlines():
            assert len(line) <= COLUMN, f"{where}: {line}"


def every_command(group):
    """Return the commands of a group, and those of the groups in it."""
    context = click.Context(group)
    for found in (group.get_command(context, name) for name in group.list_commands(context)):
        yield from every_command(found) if isinstance(found, click.Group) else [found]


@pytest.mark.ci
def test_blocks_are_found_and_failures_are_noticed(tmp_path):
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


def sentences(text):
    """Return the sentences of a page's prose: not of its code, tables and headings."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    for paragraph in re.split(r"\n\s*\n|\n(?=- |\d\. )", text):
        if not paragraph.lstrip().startswith(("|", "#", "<!--")):
            yield from re.split(r"(?<=[.!?:;])\s+", re.sub(r"\s+", " ", re.sub(r"`[^`]*`", "x", paragraph)))


def test_every_file_and_name_of_code_that_a_page_explains_is_there():
    paths = [*ROOT.glob("*"), *(path for name in TREES for path in (ROOT / name).rglob("*"))]
    paths = [path for path in paths if "__pycache__" not in path.parts]
    known = {f"/{path.relative_to(ROOT)}{'/' * path.is_dir()}" for path in paths}
    texts = (path.read_text() for path in paths if path.suffix in (".py", ".cu", ".cuh", ".c", ".cpp"))
    words = set(re.findall(r"\w+", "".join(texts)))
    for page in ABOUT_CODE:
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for path in PATH.findall(text):
            assert any(name.endswith(f"/{path}") for name in known), f"{page.name}: {path}"
        for name in {name for name in NAME.findall(text) if not PATH.match(f"`{name}`")}:
            assert set(name.split(".")) <= words | NOT_OURS, f"{page.name}: {name}"


@pytest.mark.ci
def test_errors_that_pages_show_are_those_of_the_package():
    """Of each, two fifths at least are in texts of the sources; the rest is names and numbers."""
    trees = (ast.walk(ast.parse(path.read_text())) for path in (ROOT / "distgpt").rglob("*.py"))
    texts = (node.value for tree in trees for node in tree if isinstance(node, ast.Constant))
    parts = {text.strip() for text in texts if isinstance(text, str) and len(text.strip()) > 5}
    shown = [
        (page, error)
        for page in PAGES
        for error in re.findall(r"^    distgpt: ((?:.+\n)(?:    .+\n)*)", page.read_text(), re.MULTILINE)
    ]
    for page, error in shown:
        error = re.sub(r"\s+", " ", error)
        found = {at for part in parts for i in [error.find(part)] if i >= 0 for at in range(i, i + len(part))}
        assert 5 * len(found) > 2 * len(error), f"{page.name}: {error}"
    assert len(shown) >= 4


def imported_elsewhere(files):
    """The names that files import from modules of distgpt which are not among them."""
    modules = {file.removesuffix(".py").replace("/", ".") for file in files}
    nodes = [node for file in files for node in ast.walk(ast.parse((ROOT / file).read_text()))]
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("distgpt"):
            for alias in node.names:
                if not {node.module, f"{node.module}.{alias.name}"} & modules:
                    yield node.module, alias.name


def test_what_is_read_in_an_hour_needs_little_else():
    text = (ROOT / "docs" / "explanation" / "read-in-an-hour.md").read_text()
    said = dict(re.findall(r"^\d+\. \*\*`(.*?)`\*\* \((\d+) lines\)", text, re.MULTILINE))
    lines = {file: (ROOT / file).read_text().count("\n") for file in said}
    assert len(lines) <= 12 and sum(lines.values()) <= 3200
    for file, count in lines.items():
        assert abs(count - int(said[file])) < 0.1 * count, f"{file}: {count}"
    total = int(re.search(r"about ([\d,]+) lines", text)[1].replace(",", ""))
    assert abs(sum(lines.values()) - total) < 0.1 * total, sum(lines.values())
    more = re.findall(r"`(\S+\.py)`", re.search(r"Open four more(?s:.*?)\n\n", text)[0])
    assert len(more) == 4
    files = [*lines, *(f"distgpt/{file}" for file in more)]
    assembly = set(imported_elsewhere(["distgpt/assembly.py"]))  # has a name of each part
    assert len(set(imported_elsewhere(files)) - assembly) <= 58, sorted(set(imported_elsewhere(files)) - assembly)


def test_numbers_of_lines_are_about_those_of_the_code():
    found = {path: said for page in PAGES for said, path in counts.COUNTED.findall(page.read_text())}
    assert {"distgpt", "distgpt/core/cpu/matmul"} <= set(found)
    for path, said in found.items():
        lines = counts.lines(path)
        assert abs(int(said.replace(",", "")) - lines) < 0.1 * lines, f"{path}: {lines}"
        assert counts.filled(f"{said}<!-- lines: {path} -->") == counts.rounded(lines)


def test_pages_use_no_former_name_of_a_setting_and_name_every_preset():
    former = [(name, word) for name, about in SETTINGS.items() for word, _ in about.former_choices]
    assert ("grad_sync", "hierarchical") in former
    for page, (name, word) in product(set(PAGES) - {ROOT / "CHANGELOG.md"}, former):
        found = re.search(rf'{name.replace("_", "[-_]")}[\s="`]+{word}\b', page.read_text())
        assert not found, f"{page}: {found}"
    training = (ROOT / "docs" / "how-to" / "training.md").read_text()
    presets = re.search(r"^Presets: (?s:.*?)\n\n", training, re.MULTILINE)[0]
    middle = {"MM5", "ML5", "MVL5"}  # of `MS5` … `MXL5`
    assert set(PRESETS) - middle <= set(re.findall(r"`([^`]+)`", presets))


def test_no_sentence_has_two_figures_of_speed():
    assert len(SPEED.findall("It reads 3 GB/s, twice as much, and takes 0.5 ms.")) == 2
    for page in PAGES:
        for sentence in sentences(page.read_text()):
            assert len(SPEED.findall(sentence)) < 2, f"{page.name}: {sentence}"


PRINTED = """reading my.txt
step 10/40  loss 2.3026  grad 0.468  3,414 tokens/s  left 5:05
wrote runs/first in 12 ms
"""


@pytest.mark.parametrize(
    ("shown", "wrong"),
    [
        ("step 7/600 loss 1.5 grad 1e-3 9 tokens/s left 0:01\nwrote /tmp/x in 3.1 s\n", ""),
        ("…\nwrote runs/other …\n", ""),
        ("step 7/600 …\nreading my.txt\n", "reading my.txt"),  # in another order
        ("step 7/600 loss 1.5 grad 1 9 words/s left 1\n", "step 7/600 loss 1.5 grad 1 9 words/s left 1"),
        ("step 7/600  loss 1.5\n", "step 7/600  loss 1.5"),  # not all of the line, and it does not say so
    ],
)
def test_outputs_may_differ_in_numbers_and_paths_but_not_in_words(shown, wrong):
    assert not_printed(shown, PRINTED) == wrong


@pytest.mark.ci
def test_an_output_in_a_document_is_compared(tmp_path):
    page = tmp_path / "page.md"
    for word in ("hello", "bye"):
        page.write_text(f"```bash\necho hello 1\n```\n\nIt answers:\n\n```text\n{word} 2\n```\n")
        (tmp_path / word).mkdir()
        with contextlib.nullcontext() if word == "hello" else pytest.raises(Failed, match="no longer prints"):
            run(page, tmp_path / word)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "document", [pytest.param(path, id=path.stem, marks=pytest.mark.xdist_group(path.stem)) for path in DOCUMENTS]
)
def test_every_command_of_readme_and_tutorials_works(document):
    assert main([document], for_shells()) == 0


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    here = {**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=here)
    assert result.returncode == 0, result.stderr
    page = (tmp_path / "reference" / "commands.html").read_text()
    assert "--grad-sync" in page and "distgpt weights quantize" in page
    assert "generated:" not in page


@pytest.mark.ci
def test_drawings_show_the_code_as_it_is():
    for name, draw in drawings.DRAWINGS.items():
        there = (drawings.IMAGES / f"{name}.svg").read_text()
        assert draw().svg() == there, f"{name}.svg is no longer true: python docs/drawings.py"
