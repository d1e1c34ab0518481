"""Records and results made to hurt: what is read is checked, and what is broken is left out and said."""

import json
import re
import time

import pytest
from benchresults import scaled, sums
from benchresults import trained as trained_result

from distgpt.errors import DataError
from distgpt.measure import jobs
from distgpt.measure.bench.report import assemble, load_all
from distgpt.measure.bench.report import write as write_report
from distgpt.measure.compare.page import visible
from distgpt.show.plot import read_runs

ESCAPE = "\x1b]0;owned\x07\x1b[2J\u202e"


@pytest.mark.parametrize("line", [
    '{"step": true, "loss": 1.0}', '{"step": 1.5, "loss": 1.0}', '{"step": "1", "loss": 1.0}', '{"step": -1}',
    '{"step": 1, "loss": "2.0"}', '{"step": 1, "loss": true}', '{"step": 1, "loss": NaN}', '{"step": 1e400}',
    '{"step": 1, "step": 2}', "[]", "1", '{"step": null}', '{"loss": 1.0}', "[" * 5000 + "]" * 5000,
])  # fmt: skip
def test_metrics_are_numbers_by_name(tmp_path, line):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 3.0}\n' + line + "\n")
    with pytest.raises(DataError, match="line 2"):
        read_runs([tmp_path])
    if '"loss"' in line:
        assert jobs.read_losses(tmp_path)[0] == 3.0 and len(jobs.read_losses(tmp_path)) < 3


SUMMARY = {"train_s": 1.5, "tokens_per_s": 10.0, "step_s_median": 0.1, "first_step_s": 1, "steps": 3}
SUMMARY |= {"parameters": 10, "threads": 2, "ranks": 1, "peak_memory": [1 << 30], "peak_gpu_memory": None}
SUMMARY |= {"allreduce": None}


def test_a_summary_holds_what_is_read_of_it(tmp_path):
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(SUMMARY))
    assert jobs.read_summary(tmp_path) == SUMMARY
    for key in SUMMARY:
        for wrong in ('"1"', "true", "-1", "[]", '["1"]', "NaN", "1e999", '{"a": 1}'):
            path.write_text(json.dumps({**SUMMARY, key: "@"}).replace('"@"', wrong))
            if (key, wrong) == ("allreduce", '"1"'):
                continue
            with pytest.raises(DataError, match="damaged"):
                jobs.read_summary(tmp_path)
    for text in ("", "[]", "1", "{}"):
        path.write_text(text)
        with pytest.raises(DataError, match="damaged"):
            jobs.read_summary(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match="left no summary"):
        jobs.read_summary(tmp_path)


def test_one_bad_result_does_not_take_the_page_down(tmp_path):
    good = trained_result()
    for number, broken in enumerate((
        {**sums(), "environment": []},
        {**sums(), "environment": {"date": []}, "rows": [{"bytes": "x"}]},
        {**scaled(), "kind": ["train"]},
        {**sums(), "name": None, "rows": [{**row, "seconds": "1"} for row in sums()["rows"]]},
        {**sums(), "rows": sums()["rows"] * 2000},
    )):  # fmt: skip
        (tmp_path / f"bad{number}.json").write_text(json.dumps(broken))
    for number, text in enumerate(
        ("", "NaN", '{"kind": "train", "kind": "train"}', "[" * 9999, '{"a": 1e999}')
    ):
        (tmp_path / f"torn{number}.json").write_text(text)
    (tmp_path / "good.json").write_text(json.dumps(good))
    page = write_report(tmp_path, None).read_text()
    assert "Training: gpt-mini" in page and page.count("<h2") == 3
    left_out = page[page.index("Left out") :]
    assert all(
        name in left_out for name in ("bad0.json", "bad1.json", "bad4.json", "torn0.json", "torn4.json")
    )


def test_a_result_whose_charts_cannot_be_drawn_is_left_out(monkeypatch):
    """The others, and the page, are made all the same."""
    from distgpt.show import drawing

    draw = drawing.draw_bars

    def refuse(into, chart):
        if any("evil" in bar.label for bar in chart.bars):
            raise ValueError("cannot be drawn")
        draw(into, chart)

    monkeypatch.setattr(drawing, "draw_bars", refuse)
    evil = trained_result() | {"name": "evil"}
    evil["rows"] = [{**row, "who": "evil"} for row in evil["rows"]]
    page = assemble([evil, trained_result()], [], [])
    assert "Training: gpt-mini" in page and "Left out" in page and "1 result of" in page


@pytest.mark.slow
def test_long_texts_in_results_take_no_more_time_than_short_ones(tmp_path):
    """Each field of each result in turn holds a long text, with blanks and without."""
    long = ["x" * 200_000, "word " * 40_000]
    for result in (sums(), scaled(), trained_result()):
        path = tmp_path / f"{result['kind']}.json"
        text = json.dumps(result)
        for word in long:
            path.write_text(
                re.sub(r': "[^"]{1,9}"(?=[,}])', f': "{word}"', text).replace(
                    f'"kind": "{word}"', f'"kind": "{result["kind"]}"'
                )
            )
            found, _ = load_all(tmp_path)
            begun = time.process_time()
            assemble(found, [], [])
            assert time.process_time() - begun < 20
        path.unlink()


def test_a_text_of_blanks_is_said_to_be_one():
    assert visible("a b") == "a b" and visible(" x") == " x"
    assert visible(" " * 12 + "\n") == "(nothing to be seen: 12 spaces, 1 line break)"
    assert visible("\t\u2003") == "(nothing to be seen: 2 other blanks)" and "no text" in visible("")
