"""Notebooks: the code runs from top to bottom without Jupyter, and the stored outputs have no errors."""

import json
import re

import notebook_pages
import numpy as np
import pytest
from run import ROOT


def cells(notebook):
    return json.loads(notebook.read_text())["cells"]


def run(notebook):
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
    found = run(ROOT / "docs" / "notebooks" / "first-model.ipynb")
    assert re.findall(r"^step (\d+): loss \d", capsys.readouterr().out, re.M) == [*map(str, range(25, 201, 25))]
    losses = [line["loss"] for line in found["training"]]
    assert losses[-1] < 3 < 5 < losses[0] and len(found["held_out"]) == 4
    assert found["more"].metrics[-1]["step"] == 200 and (scratch / "runs" / "notebook").is_dir()


def test_look_inside_checks_gradient(scratch):
    found = run(ROOT / "docs" / "notebooks" / "look-inside.ipynb")
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
