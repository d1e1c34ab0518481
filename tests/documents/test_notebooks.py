"""Notebooks: their code runs from top to bottom, without Jupyter, and no outputs are stored in them."""

import json
import re

import numpy as np
import pytest
from run import ROOT


def cells(notebook):
    return json.loads(notebook.read_text())["cells"]


def run(notebook):
    """Run its code in one namespace, which is returned."""
    names = {"__name__": "__main__"}
    for number, cell in enumerate(cells(notebook), 1):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"{notebook.name}, cell {number}", "exec"), names)
    return names


@pytest.fixture
def scratch(tmp_path, monkeypatch):
    import matplotlib.pyplot as plt  # at the top each worker would import it to collect tests

    monkeypatch.chdir(tmp_path)
    before = plt.get_backend()
    plt.switch_backend("agg")
    yield tmp_path
    plt.close("all")
    plt.switch_backend(before)


@pytest.mark.ci
def test_the_first_model_learns_and_goes_on(scratch, capsys):
    found = run(ROOT / "docs" / "notebooks" / "first-model.ipynb")
    assert re.findall(r"^step (\d+): loss \d", capsys.readouterr().out, re.M) == [*map(str, range(25, 201, 25))]
    losses = [line["loss"] for line in found["training"]]
    assert losses[-1] < 3 < 5 < losses[0] and len(found["held_out"]) == 4
    assert found["more"].metrics[-1]["step"] == 200 and (scratch / "runs" / "notebook").is_dir()


def test_a_look_inside_shows_attention_and_a_right_gradient(scratch):
    found = run(ROOT / "docs" / "notebooks" / "look-inside.ipynb")
    assert found["figure"].axes and np.isclose(found["chances"].sum(), 1)
    assert found["quotient"] == pytest.approx(found["gradient"][found["place"]], rel=1e-5)


def test_no_outputs_are_stored():
    notebooks = [*(ROOT / "docs" / "notebooks").glob("*.ipynb")]
    assert notebooks and not any(cell.get("outputs") for notebook in notebooks for cell in cells(notebook))
