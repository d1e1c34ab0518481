"""Documents: links resolve, commands work, words are plain, extensions train, and the site builds without warnings."""

import ast
import contextlib
import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile

import click
import distgpt as package
import drawings
import notebook_pages
import numpy as np
import pytest
from distgpt.assembly import AllComponents
from distgpt.commands.cli import cli
from distgpt.core import components
from distgpt.core.base.errors import DataError, UsageError
from distgpt.core.config import RunConfig
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.core.saved.tensors import read_header, read_into
from run import DOCUMENTS, ROOT, Failed, blocks, main, run

from conftest import ci_ranks, distgpt, for_shells, losses, needs_mpi, succeeded

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


SEAMS_PAGE = (ROOT / "docs" / "explanation" / "seams.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", SEAMS_PAGE, re.DOTALL | re.MULTILINE)
FILES = {text.splitlines()[0].removeprefix("# "): text for text in BLOCKS}
SIZE = {"preset": "tiny-adamw", "n_layer": 1, "n_head": 2, "n_embd": 16, "seq_len": 16, "batch_size": 4}
SIZE |= {"data": "story", "steps": 6, "threads": 1}


@pytest.fixture
def extensions(tmp_path, monkeypatch):
    monkeypatch.setattr(components, "_installed", components.components())  # undone at the end
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    return lambda name: importlib.import_module(name).MyComponents()


def bytes_of(trained):
    return (trained.directory / "weights.safetensors").read_bytes()


def test_memory_callback_adds_metric_and_ends_run(tmp_path, extensions):
    plain = package.train(**SIZE, out=tmp_path / "plain")
    guarded = extensions("memory_guard")
    watched = package.train(**SIZE, out=tmp_path / "watched", components=guarded)
    assert bytes_of(plain) == bytes_of(watched)
    assert "memory_mb" not in plain.metrics[0] and watched.metrics[0]["memory_mb"] > 1
    sys.modules["memory_guard"].MOST = 0
    with pytest.raises(BaseException, match="memory is running out"):
        package.train(**SIZE, out=tmp_path / "ended", components=guarded)
    assert 1 <= len(losses(tmp_path / "ended")) < SIZE["steps"]
    assert list((tmp_path / "ended" / "checkpoints").iterdir())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    [path] = builder.build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])
    with zipfile.ZipFile(path) as file:
        file.extractall(folder := tmp_path_factory.mktemp("site"))
    return folder


def command(tmp_path, out, *more, ranks=1, wheel=None):
    words = [f"--{name.replace('_', '-')}={value}" for name, value in SIZE.items()]
    stage = ("--stage", "mpi") if ranks > 1 else ()
    how = {"env": {"PYTHONPATH": os.pathsep.join(map(str, filter(None, (wheel, tmp_path))))}, "cold": bool(wheel)}
    return distgpt("train", *words, *stage, "--out", tmp_path / out, *more, ranks=ranks, timeout=300, **how)


@pytest.mark.ci
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_mpi)])
@pytest.mark.parametrize("name", [name for name in FILES if name not in ("orthogonal.py", "loop.py")])
def test_component_files_train_by_command(tmp_path, extensions, wheel, name, ranks):
    more = {"quick_gelu.py": ["--set", "mlp=quick_gelu"], "digraphs.py": ["--tokenizer", "digraphs:thheinan"]}
    own = ["--components", f"{name.removesuffix('.py')}:MyComponents"]
    result = command(tmp_path, "run", *own, *more.get(name, []), ranks=ranks, wheel=wheel)
    assert result.returncode == 0, result.stderr
    assert f"components: {own[1]}" in result.stdout + result.stderr
    assert len(losses(tmp_path / "run")) == SIZE["steps"]


@ci_ranks
def test_topk_exchange_saves_residual(tmp_path, extensions):
    own = ("--components", "topk:MyComponents", "--schedule", "constant", "--save-every", "3")
    how = {"ranks": 2}
    assert command(tmp_path, "whole", *own, "--set", "extra.fraction=0.05", **how).returncode == 0
    assert command(tmp_path, "half", *own, "--set", "extra.fraction=0.05", "--steps", "3", **how).returncode == 0
    shutil.copytree(tmp_path / "half", tmp_path / "alone")
    assert command(tmp_path, "half", *own, "--resume", "auto", **how).returncode == 0
    assert losses(tmp_path / "half") == losses(tmp_path / "whole")
    other = command(tmp_path, "alone", *own, "--resume", "auto")
    assert other.returncode == 0 and "has no state of TopK for these ranks" in other.stdout + other.stderr
    text = FILES["topk.py"]
    (tmp_path / "double.py").write_text(text.replace("self.mean_factor = 1 /", "self.mean_factor = 2 /"))
    for complaint, out, more in (
        ("extra.fraction must be at most 1, not 2.0", "no", [*own, "--set", "extra.fraction=2"]),
        ("did you mean 'extra.fraction'", "no", [*own, "--set", "extra.fractoin=1"]),
        ("extra.fraction", "half", ["--resume", "auto", "--steps", "9"]),
        ("--grad-sync sharded", "no", [*own, "--grad-sync", "sharded"]),
        ("it must be 1.5", "no", ["--components", "double:MyComponents"]),  # the mean of a gradient over the ranks
    ):
        result = command(tmp_path, out, *more, **how)
        assert result.returncode == 2 and complaint in result.stderr, result.stderr
        assert "extra" not in complaint or not (tmp_path / "no").exists()


def test_callback_state_survives_resume(tmp_path, extended):
    class Counting(contextlib.nullcontext):
        steps = 0

        def after_step(self, done):
            self.steps += 1
            return {"counted": self.steps}

        def state(self):
            return {"steps": self.steps}

        def load(self, state):
            self.steps = state["steps"]

    extended(callbacks=lambda self, run, limits: [*AllComponents.callbacks(self, run, limits), Counting()])
    first = package.train(**SIZE, out=tmp_path / "run")
    again = package.train(**SIZE | {"steps": 9}, out=tmp_path / "run", resume="auto")
    lines = [line["counted"] for line in (*first.metrics, *again.metrics) if "counted" in line]
    assert lines == [*range(1, 10)]


@ci_ranks
@pytest.mark.parametrize("sync", ["allreduce", "sharded"])
def test_lion_updates_whole_and_sharded_weights(tmp_path, extensions, sync):
    own = ("--components", "lion:MyComponents", "--dtype", "float32", "--lr", "1e-3")
    assert command(tmp_path, sync, *own, "--grad-sync", sync, ranks=2).returncode == 0
    alone = package.train(**SIZE, dtype="float32", lr=1e-3, out=tmp_path / "one", components=extensions("lion"))
    np.testing.assert_allclose(losses(tmp_path / sync), losses(alone.directory), rtol=1e-4)
    adamw = package.train(**SIZE, dtype="float32", lr=1e-3, out=tmp_path / "adamw", components=AllComponents())
    assert losses(adamw.directory)[-1] != losses(alone.directory)[-1]


def test_lion_follows_its_update_rule(tmp_path, extensions):
    components.install(extensions("lion"))
    model = package.init(package.ModelConfig(n_layer=1, n_head=1, n_embd=8, seq_len=4), tokenizer="byte")
    optimizer = model.optimizer(weight_decay=0.1, beta1=0.9, beta2=0.99, clip=0.0)
    name = "blocks.0.attn.proj.w"
    p, m = model.parameters()[name].astype(float).copy(), 0.0
    rng = np.random.default_rng(0)
    for _ in range(3):
        gradients = {key: np.zeros_like(value) for key, value in model.parameters().items()}
        g = gradients[name] = rng.standard_normal(p.shape).astype(np.float32)
        optimizer.step(gradients, lr=0.01)
        p = p * (1 - 0.01 * 0.1) - 0.01 * np.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
    np.testing.assert_allclose(model.parameters()[name], p, rtol=1e-5)


def test_activation_gradient_matches_differences(tmp_path, extensions):
    components.install(extensions("quick_gelu"))
    config = package.ModelConfig(n_layer=1, n_head=1, n_embd=8, seq_len=4, mlp="quick_gelu")
    model = package.init(config, tokenizer="byte", dtype="float64")
    tokens, targets = [[1, 2, 3, 4]], [[2, 3, 4, 5]]
    gradient = model.gradients(tokens, targets)["blocks.0.mlp.fc.w"]
    weight = model.parameters()["blocks.0.mlp.fc.w"]
    for place in ((0, 0), (5, 3)):
        before, around = weight[place], []
        for step in (1e-5, -1e-5):
            weight[place] = before + step
            around.append(model.loss(tokens, targets))
        weight[place] = before
        np.testing.assert_allclose(gradient[place], (around[0] - around[1]) / 2e-5, rtol=1e-5, atol=1e-9)
    with pytest.raises(DataError, match=r"mlp is 'quick_gelu'.*DISTGPT_COMPONENTS"):
        model.save(tmp_path / "own.safetensors")
        from distgpt.core.ops.activations import ACTIVATIONS

        del ACTIVATIONS["quick_gelu"]
        package.load(tmp_path / "own.safetensors")


def test_token_ids_beyond_vocabulary_are_rejected(tmp_path, extensions):
    own = extensions("digraphs")
    sys.modules["digraphs"].Digraphs.size = property(lambda tokenizer: 256, lambda tokenizer, size: None)
    with pytest.raises(DataError, match=r"digraphs\b.*\b256 .*\b25\d$"):
        package.train(**SIZE, tokenizer="digraphs:thheinan", out=tmp_path / "run", components=own)


def test_weights_load_with_unknown_training_settings(tmp_path, monkeypatch):
    trained = package.train(**SIZE, out=tmp_path / "run")
    to_toml = RunConfig.to_toml
    monkeypatch.setattr(RunConfig, "to_toml", lambda run: to_toml(run).replace('"allreduce"', '"topk"'))
    trained.model.save(tmp_path / "other.safetensors")
    other = package.load(tmp_path / "other.safetensors")
    assert other.generate("The", 5) == trained.model.generate("The", 5)
    package.train(**SIZE, init=str(tmp_path / "other.safetensors"), out=tmp_path / "more")
    package.train(**SIZE, out=tmp_path / "saved")
    monkeypatch.undo()
    with pytest.raises(UsageError, match="grad_sync"):
        package.train(out=tmp_path / "saved", resume="auto", steps=9)


@pytest.mark.ci
@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=needs_mpi)])
def test_custom_loop_learns(tmp_path, extensions, ranks):
    result = succeeded(ranks=ranks, cwd=tmp_path, program=[sys.executable, "loop.py"], by=distgpt)
    rows = [line.split() for line in result.stdout.splitlines()]
    assert float(rows[-1][1]) < 0.6 * float(rows[0][1])
    assert package.load(tmp_path / "own.safetensors").generate("The", 5)


@pytest.mark.ci
def test_orthogonal_adapter_trains_and_loads_as_lora(tmp_path, extensions):
    init = str(package.train(**SIZE, out=tmp_path / "base").directory / "weights.safetensors")
    how = {**SIZE, "init": init, "lora_rank": 4, "lora_matrices": "q,v", "steps": 20}
    lora = package.train(**how, out=tmp_path / "lora")
    own = package.train(**how, out=tmp_path / "own", components=extensions("orthogonal"))
    assert bytes_of(own) != bytes_of(lora) and losses(own.directory) != losses(lora.directory)
    assert min(losses(own.directory)[-3:]) < losses(own.directory)[0]
    headers = [read_header(run.directory / "weights.safetensors") for run in (own, lora)]
    assert headers[0].tensors.keys() == headers[1].tensors.keys()
    first = package.train(**{**how, "steps": 1, "lr": 1e-9}, out=tmp_path / "one")
    path = first.directory / "weights.safetensors"
    host = {key: np.empty(entry.shape, np.float32) for key, entry in read_header(path).tensors.items()}
    read_into(path, host)
    a = host["blocks.0.attn.q.lora_a"]
    np.testing.assert_allclose(a @ a.T, np.eye(4), atol=1e-4)
    assert package.load(own.directory).generate("The", max_new_tokens=3, seed=1)


def test_custom_schedule_continues_after_resume(tmp_path, extensions):
    restarting = extensions("restarts")
    sys.modules["restarts"].PERIOD = 4
    how = {**SIZE, "warmup": 0, "lr": 0.008, "save_every": 3}
    trained = package.train(**how, out=tmp_path / "run", components=restarting)
    again = package.train(**how | {"steps": 10}, out=tmp_path / "run", resume="auto")
    rates = [line["lr"] for line in (*trained.metrics, *again.metrics) if "lr" in line]
    wanted = [0.004 * (1 + np.cos(np.pi * (step % 4) / 4)) for step in range(10)]
    np.testing.assert_allclose(rates, wanted, rtol=1e-6)


def test_custom_tokenizer_is_saved_and_loaded(tmp_path, extensions):
    own = extensions("digraphs")
    trained = package.train(**SIZE, tokenizer="digraphs:thheinan", out=tmp_path / "run", components=own)
    saved = load_tokenizer(str(trained.directory))
    assert saved.kind == "digraphs" and saved.size == 260 and saved.describe()
    text = "the thing that he heard in a"
    ids = saved.encode(text)
    assert saved.decode(ids) == text and len(ids) < len(text) and (ids >= 256).any()
    assert json.loads(saved.to_json())["pairs"] == "thheinan"
    more = SIZE | {"steps": 8, "tokenizer": "digraphs:thheinan"}
    assert len(losses(package.train(**more, out=tmp_path / "run", resume="auto").directory)) == 8
    with pytest.raises(UsageError, match="not a kind or a file"):
        load_tokenizer("digraphs:odd")
