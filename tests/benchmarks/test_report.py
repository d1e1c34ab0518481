import re
from itertools import product
from pathlib import Path

import pytest
import report
from charts import LineChart, Series
from click.testing import CliRunner
from distgpt.core.base.errors import DataError, UsageError
from distgpt.measure import jobs
from distgpt.show.page import Table
from pages import Section
from pages import html as html_page
from report import assemble, load_all, write

HERE = {"date": "2026-01-02T10:00:00+00:00", "command": "distgpt bench x", "processor": "A", "cores": 2}


def sums():
    rows = []
    for size, name in product((8, 4096, 1 << 20), ("allreduce", "hierarchical")):
        seconds = 2e-5 + size * 1e-9
        rates = {"bytes_per_s": size / seconds, "bus_bytes_per_s": size / seconds, "repeats": 3}
        rows.append({"algorithm": name, "bytes": size, "seconds": seconds, "min_seconds": seconds / 2, **rates})
    facts = {"stage": "mpi", "ranks": 2, "nodes": 1, "ranks_per_node": 2, "cores_per_rank": 1.0}
    facts |= {"library": "MPICH <5>", "not_measured": [], "left_out": {"nccl": "none"}}
    return {"kind": "allreduce", "name": "mpi-2", "environment": HERE, **facts, "rows": rows}


def trained():
    row = {"stage": "mpi", "ranks": 2, "mfu": 0.625, "peak_memory": [1 << 30, 1 << 30]}
    rows = [{**row, "who": "distgpt", "tokens_per_s": 5000.0}]
    rows.append({**row, "who": "torch", "tokens_per_s": 2500.0, "mfu": None, "peak_memory": None})
    peer = {"mode": "eager", "ratio": 2.0, "ratios": [1.9, 2.0, 2.1], "memory_ratio": 0.5}
    more = {"peak_gflops": 123.4, "peers": [peer]}
    return {"kind": "train", "name": "gpt-mini", "environment": HERE, "rows": rows, **more}


def headings(page):
    return re.findall(r"<h2[^>]*>(.*?)</h2>", page)


def test_incomplete_result_is_named_and_skipped():
    whole = sums()
    page = assemble([whole, trained()], [])
    assert headings(page) == ["Training: gpt-mini", "Sums over ranks: mpi-2"]
    told = "2 results|2026-01-02|cores of A|62%|123 GFLOP/s|2.00 × PyTorch|1.90, 2.00, 2.10|nccl skipped"
    assert all(words in page for words in told.split("|")) and page.count("<svg") == 2
    assert "MPICH &lt;5&gt;" in page and "<5>" not in page
    broken = {key: value for key, value in whole.items() if key != "rows"} | {"name": "broken"}
    page = assemble([broken, trained()], ["notes.json"])
    assert headings(page) == ["Training: gpt-mini", "Left out"]
    assert "allreduce: broken" in page and "notes.json" in page and "1 result of" in page


def test_directory_becomes_a_page(tmp_path):
    with pytest.raises(UsageError, match="nowhere"):
        write(tmp_path / "nowhere", None)
    (tmp_path / "profile.json").write_text("{}")
    with pytest.raises(DataError, match=str(tmp_path)):
        write(tmp_path, None)
    assert not (tmp_path / "report.html").exists()
    for result in (sums(), trained()):
        jobs.save(tmp_path, result["kind"], result["name"], result)
    (tmp_path / "torn.json").write_text('{"kind": "train"')
    (tmp_path / "renamed.json").write_text('{"kind": "train", "name": "x", "environment": {}}')
    result = CliRunner().invoke(report.main, [str(tmp_path)])
    assert result.exit_code == 0 and result.stdout.strip() == str(tmp_path / "report.html"), result.output
    page = (tmp_path / "report.html").read_text()
    assert "profile.json, torn.json, renamed.json" in page and headings(page)[-1] == "Left out"


@pytest.mark.parametrize(
    "name, file", [("日本 1", "日本-1"), ("a/b..c", "a-b..c"), ("../..", "..-.."), ("///", "unnamed")]
)
def test_name_becomes_a_file_name(name, file, tmp_path):
    assert jobs.save(tmp_path, "train", name, trained()) == tmp_path / f"train-{file}.json"
    assert [each["file"] for each in load_all(tmp_path)[0]] == [f"train-{file}.json"]


@pytest.mark.ci
def test_results_in_repository_are_readable():
    found, _ = load_all(Path(__file__).parents[2] / "benchmarks" / "results")
    assert {result["file"] for result in found} >= {"forward-2026-11-21.json"}
    page = assemble(found, [])
    assert "Left out" not in page and len(headings(page)) == len(found)


def test_page_is_self_contained_and_escapes_text():
    h = "</title></style><script>alert('x')</script> \"quoted\" \x00\x1b[31m\u202e \ud800 ]]>"
    chart = LineChart(h, h, h, h, [Series(h, [(1, 1), (2, 2)])])
    blocks = [h, Table([h], [[h]], h, h), Table(["a"], [["b"]]), chart]
    page = html_page(h, h, [Section(h, blocks)] * 3, h)
    tags = {tag.lower() for tag in re.findall(r"<([A-Za-z]+)", page)}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "image"}
    assert not re.search(r"<[^>]*\s(src|srcset|on\w+)=", page) and "default-src 'none'" in page
    ids = set(re.findall(r' id="([^"]+)"', page))
    assert {*re.findall(r' aria-labelledby="([^"]+)"', page), *re.findall(r'href="#([^"]+)"', page)} <= ids
    assert not set(page) & {"\x00", "\x1b", "\u202e", "\ud800"} and len(headings(page)) == 3
