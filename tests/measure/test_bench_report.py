"""`distgpt bench report`: every result finds its place on one page, and what is none is named."""

import json
import re
from pathlib import Path

import pytest
from benchresults import HERE, THERE, forwarded, scaled, sums, trained
from click.testing import CliRunner
from conftest import distgpt, refused

from distgpt.commands.bench import report as command_line
from distgpt.errors import DataError, UsageError
from distgpt.measure.bench import results
from distgpt.measure.bench.report import assemble, load_all, machine, write


def headings(page):
    return re.findall(r"<h2[^>]*>(.*?)</h2>", page)


def test_every_kind_has_its_section_with_tables_and_charts():
    page = assemble([sums(), scaled(), forwarded("input"), trained()], [], [])
    first = ["Forward pass: S", "Training: gpt-mini", "Scaling: tiny", "Sums over ranks: mpi-2"]
    assert headings(page) == [*first, "Measured on"]
    assert page.count("<svg") >= 8 and page.count("<table") >= 5
    told = "4 results|from 2026-01-02 to 2026-03-04|62%|123 GFLOP/s|2.00 × PyTorch|1.90, 2.00, 2.10|2 GiB"
    for words in (*told.split("|"), "from 4,096 ranks on", "nccl left out"):
        assert words in page, words
    assert "Predicted, not measured" in page and "stroke-dasharray" in page
    assert "MPICH &lt;5&gt;" in page and "<5>" not in page
    assert "share cores" in page and page.count("4*") == 2


def test_no_result_needs_the_others_and_a_study_without_a_sweep_has_bars():
    for result in (sums(), scaled(), forwarded(), trained()):
        page = assemble([result], [], [])
        assert len(headings(page)) == 2 and "Left out" not in page
    assert "speed-up over one name at a time" in assemble([forwarded()], [], [])


def test_what_is_the_same_is_told_once_and_what_differs_is_named():
    same, differ = machine([HERE, THERE])[0], [block.text for block in machine([HERE, THERE])[1:]]
    assert same.pairs == [("cores", "2")]
    assert "processor: A / B" in differ and "memory bytes: unknown / 4.0 GiB" in differ
    assert len(machine([HERE, HERE])) == 1


def test_a_result_with_parts_missing_is_named_and_the_others_are_shown():
    for lack, whole in (("rows", sums()), ("measured", scaled()), ("model", scaled())):
        broken = {key: value for key, value in whole.items() if key != lack} | {"name": "broken"}
        page = assemble([broken, trained()], ["notes.json"], [])
        assert headings(page) == ["Training: gpt-mini", "Measured on", "Left out"], lack
        assert f"{broken['kind']}: broken" in page and "notes.json" in page and "1 result of" in page


def save(folder, result):
    (folder / f"{result['kind']}-{result['name']}.json").write_text(json.dumps(result))


def test_a_folder_becomes_a_page(tmp_path):
    for result in (sums(), trained()):
        save(tmp_path, result)
    (tmp_path / "torn.json").write_text('{"kind": "train"')
    (tmp_path / "renamed.json").write_text('{"kind": "train", "name": "x", "environment": {}}')
    (tmp_path / "profile.json").write_text("{}")
    result = CliRunner().invoke(command_line, [str(tmp_path)])
    assert result.exit_code == 0 and result.stdout.strip() == str(tmp_path / "report.html"), result.output
    page = (tmp_path / "report.html").read_text()
    assert "torn.json, renamed.json" in page and "train-x" not in page and "profile.json: a profile" in page
    assert headings(page)[-2:] == ["Beside these", "Left out"]


def test_a_name_becomes_a_files(tmp_path):
    names = {"日本 1": "日本-1", "a/b..c": "a-b..c", "../..": "..-..", "///": "unnamed"}
    for name, file in names.items():
        assert results.save(tmp_path, "train", name, trained()) == tmp_path / f"train-{file}.json", name
    assert {each["file"] for each in load_all(tmp_path)[0]} == {
        f"train-{file}.json" for file in names.values()
    }


def test_the_results_in_the_repository_are_still_read():
    """Those of earlier versions too."""
    folder = Path(__file__).parents[2] / "benchmarks" / "results"
    found, _ = load_all(folder)
    assert {result["file"] for result in found} >= {"forward-2026-11-21.json"}
    page = assemble(found, [], [])
    assert "Left out" not in page and len(headings(page)) == len(found) + 1


def test_a_comparisons_report_is_not_overwritten(tmp_path):
    save(tmp_path, trained())
    (tmp_path / "compare.json").write_text("{}")
    with pytest.raises(UsageError, match="--out"):
        write(tmp_path, None)
    assert write(tmp_path, tmp_path / "bench.html").exists()


def test_no_results_no_page(tmp_path):
    refused(distgpt("bench", "report", tmp_path), 65, "holds no results")
    with pytest.raises(UsageError, match="is no folder"):
        write(tmp_path / "nowhere", None)
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(DataError):
        write(tmp_path, None)
    assert not (tmp_path / "report.html").exists()
