"""Documents: links lead somewhere, commands work, and the site is built without a warning."""

import os
import re
import subprocess
import sys

import pytest
from run import DOCUMENTS, ROOT, Failed, blocks, main, run

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
LINK = re.compile(r"\]\(([^)\s]+)\)")


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


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_of_readme_and_tutorials_works():
    assert main(list(DOCUMENTS)) == 0


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
