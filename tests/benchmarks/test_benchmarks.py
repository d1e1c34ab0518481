import json
import math
import re
import sys
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import forward_study
import infer_beside_peers
import peer_process
import pytest
import report
import scaling
import train_beside_torch
from benching import FEW, RANKS, SMALL, STAGE, found_in, here, peak_here
from charts import LineChart, Series
from click.testing import CliRunner
from distgpt.cluster.jobs.processes import run
from distgpt.core.base.errors import DataError, DisagreementError, DistgptError, UsageError
from distgpt.core.config.presets import preset
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.ops.kernels import Kernels
from distgpt.measure import jobs
from distgpt.measure.bench import train
from distgpt.measure.jobs import unsteered
from distgpt.show.page import Table
from forward_peers import measure_plain
from forward_study import Study, StudyOptions
from forward_work import AGREE, bundled_names, refuse_different_losses, row_of
from mean_loss import MeanLoss
from pages import Section
from pages import html as html_page
from report import assemble, load_all, write
from threadranks import on_all_ranks

from conftest import needs_mpi
from models import VARIANTS, build, one_by_one, sequences_for

DOUBLE = replace(FEW, dtype="float64")


@pytest.mark.slow
def test_study_prints_and_saves_results(tmp_path):
    words = ["--preset", "microgpt", "--names", 60, "--repeats", 1, "--threads", 1, "--method", "batched"]
    done = run([sys.executable, forward_study.__file__, *words, "--out", tmp_path], env=unsteered())
    assert done.code == 0, done.errors
    found = json.loads((tmp_path / "forward-microgpt.json").read_text())
    assert [(r["method"], r["names"], r["ranks"]) for r in found["rows"]] == [("batched", 60, 1)]
    assert "Forward pass: microgpt" in (page := assemble(*load_all(tmp_path))) and "Left out" not in page


class Here(Study):
    """A study that measures in this process."""

    def measure(self, job):
        return here(job)


def study_of(methods, dtypes=("float32",), **more):
    options = StudyOptions(methods=methods, dtypes=dtypes, threads=1, repeats=1, **more)
    return Here(options, methods, None, "")


def test_study_measures_each_type_and_method():
    rows = study_of(["batched"], ["float32", "float64"], names=80).rows(["microgpt"])
    assert [(r["names"], r["dtype"]) for r in rows] == [(80, dtype) for dtype in ("float32", "float64")]
    jobs = study_of(["serial", "batched", "cuda"], ["float32", "bfloat16"]).jobs("S", 2)
    dtypes = [(method, dtype) for method in ("batched", "cuda") for dtype in ("float32", "bfloat16")]
    assert [(job.method, job.dtype) for job in jobs] == [("serial", "float64"), *dtypes]


def test_methods_give_equal_losses():
    reference = row_of(DOUBLE, here(DOUBLE, threads=2))
    plain = replace(DOUBLE, method="python")
    refuse_different_losses([reference, row_of(plain, measure_plain(plain))])
    for method, dtype in (("serial", "float64"), ("batched", "float32")):
        found = row_of(job := replace(FEW, method=method, dtype=dtype), here(job))
        refuse_different_losses([reference, found])
        assert found["measured"] == found["names"] == 90 and found["seconds"] > 0, method
        assert found["tokens"] == sum(len(name) + 1 for name in bundled_names(90))


def test_different_loss_ends_the_command():
    double = row_of(FEW, found_in(1.0, 90)) | {"dtype": "float64"}
    other = double | {"method": "torch", "dtype": "float32"}
    refuse_different_losses([double, other | {"loss": double["loss"] * (1 + AGREE["float32"] / 2)}])
    for loss in (double["loss"] * (1 + 2 * AGREE["float32"]), math.nan, math.inf):
        with pytest.raises(DisagreementError, match="torch in float32"):
            refuse_different_losses([double, other | {"loss": loss}])


@pytest.mark.ci
@pytest.mark.parametrize("words, named", [("--method serial --dtype bfloat16", "serial"), ("--peer /no", "torch")])
def test_invalid_options_are_rejected(words, named):
    error = CliRunner().invoke(forward_study.main, words.split()).exception
    assert isinstance(error, DistgptError) and named in str(error)


SMALL_RUN = "--n-layer 1 --n-head 2 --n-embd 16 --seq-len 16 --batch-size 4 --data story --tokenizer word --steps 6"


@pytest.mark.ranks
@needs_mpi
@pytest.mark.slow
def test_speeds_are_compared_with_one_rank(tmp_path):
    words = ["--ranks", "2", "--threads", "1", "--out", tmp_path]
    result = run([sys.executable, scaling.__file__, *SMALL_RUN.split(), *words], env=unsteered())
    assert result.code == 0, result.errors
    file = json.loads((tmp_path / "scaling-tiny.json").read_text())
    rows = [(row["mode"], row["ranks"], row["batch"]) for row in file["measured"]]
    assert rows == [("strong", 1, 4), ("strong", 2, 4), ("weak", 1, 4), ("weak", 2, 8)]
    for row in file["measured"]:
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * 16 / row["step_s"])
        assert row["speedup"] == pytest.approx(row["tokens_per_s"] / file["measured"][0]["tokens_per_s"])
        assert row["efficiency"] == pytest.approx(row["speedup"] / row["ranks"])
    page = assemble(*load_all(tmp_path))
    assert "Scaling: tiny" in page and "Left out" not in page


@pytest.mark.parametrize("words, named", [("--ranks 1,0", "'1,0'"), ("--ranks 3", "3 ranks"), ("--init w", "--init")])
def test_invalid_options_are_rejected_before_running(tmp_path, words, named):
    asked = [*SMALL_RUN.split(), *words.split(), "--out", str(tmp_path / "out")]
    error = CliRunner().invoke(scaling.main, asked).exception
    assert isinstance(error, UsageError) and named in str(error) and not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["gpt2", "modern", "microgpt"])
def test_batches_give_loss_of_single_sequences(kind):
    config = VARIANTS[kind]
    sequences, reference = sequences_for(config), build(config, Kernels("float64"))
    for threads, most in product((1, 2), (1, 20, 1 << 14)):
        kept = MeanLoss(build(config, CpuKernels("float64", threads)), most)
        for some in (sequences, sequences[5:8]):  # reuses memory
            expected = pytest.approx(one_by_one(reference, some), rel=1e-12)
            assert kept([each.tolist() for each in some]) == kept(some) == expected, (threads, most)


def test_ranks_get_loss_of_one_process():
    config = VARIANTS["microgpt"]
    for count in (40, 2):  # one of three ranks has no sequence of 2
        sequences = sequences_for(config, count)
        expected = one_by_one(build(config, Kernels("float64")), sequences)
        found = on_all_ranks(3, lambda comm, own=sequences: MeanLoss(build(config, Kernels("float64")), 20)(own, comm))
        assert found == [pytest.approx(expected, rel=1e-12)] * 3, count


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


PEER = {"step_s_median": 0.2, "first_loss": 5.1, "final_loss": 5.0, "threads": 1, "peak_rss_bytes": 9}
PEER |= {"torch": "0"}

# Answers like peer_torch.py and records its requests; "compile" makes it faster.
FAKE = """#!{python}
import json, sys
if sys.argv[1] == "-c":
    print("2.0")
else:
    open({heard!r}, "a").write(sys.argv[3] + "\\n")
    seconds = 0.1 if json.loads(sys.argv[3])["compile"] else 0.2
    print(json.dumps({peer!r} | {{"tokens_per_s": 10 / seconds, "step_s_min": seconds}}))
"""


def bench(*words):
    return CliRunner().invoke(train_beside_torch.main, list(map(str, words)))


@pytest.mark.ci
@pytest.mark.ranks
def test_peer_gets_our_model_and_ratios_are_of_pairs(tmp_path, monkeypatch):
    python, heard = tmp_path / "python", tmp_path / "heard"
    python.write_text(FAKE.format(python=sys.executable, heard=str(heard), peer=PEER))
    python.chmod(0o755)
    peer = ("--peer-python", python, "--rounds", 2, "--peer-mode", "eager", "--peer-mode", "best")
    size = ("--preset", "tiny-adamw", *SMALL, "--threads", 1, "--stage", STAGE)
    monkeypatch.setattr(train, "peak_gflops", partial(train.peak_gflops, seconds=0.05))
    monkeypatch.setattr(jobs, "ask", peak_here)
    done = bench(*size, "--name", "found", "--out", tmp_path, *peer)
    assert done.exit_code == 0, done.output
    requests = [json.loads(line) for line in heard.read_text().splitlines()]
    found = json.loads((tmp_path / "train-found.json").read_text())
    eager, best = found["peers"]
    assert (eager["mode"], best["mode"], len(found["runs"])) == ("eager", "compile+keep-freed", 2)
    for peer, speed in ((eager, 50), (best, 100)):
        ratios = [run["ours"]["tokens_per_s"] / speed for run in found["runs"]]
        assert peer["ratios"] == pytest.approx(ratios) and peer["ratio"] == pytest.approx(sum(ratios) / 2)
    shape = {"n_embd": 16, "bias": False, "norm_gain": True, "positions": "rope", "vocab_size": 256}
    recipe = {"threads": RANKS, "batch_size": 4, "lr": preset("tiny-adamw").train.lr, "dtype": "float32"}
    for request in requests:
        assert request["shape"].items() >= shape.items() and request.items() >= recipe.items()
    assert "× PyTorch (eager)" in " ".join(done.stdout.split())
    tried, trained = requests[:3], requests[3:]  # the fastest mode is measured once, and rounds alternate
    assert {name for name in peer_process.SWITCHES if tried[-1][name]} == {"autotune", "keep_freed"}
    assert [(each["compile"], each["keep_freed"]) for each in trained] == [(False, False), (True, True)] * 2


@pytest.mark.ci
@pytest.mark.parametrize("words, named", [
    ("--peer-python /nowhere", "torch"), ("--stage cuda", "cores"), ("--dtype float64", "float32"),
    ("--peer-mode keep-fred", "keep_fred"),
])  # fmt: skip
def test_invalid_peer_options_are_rejected(words, named):
    error = bench(*words.split()).exception
    assert isinstance(error, UsageError) and named in str(error)


@pytest.mark.peer
def test_pytorch_trains_and_generates(tmp_path):
    pytest.importorskip("torch")
    done = bench("--preset", "tiny-adamw", *SMALL, "--threads", 1, "--rounds", 1, "--out", tmp_path)
    printed = " ".join(done.stdout.split()).replace("- ", "-")  # undo line breaks
    assert done.exit_code == 0 and "× PyTorch (keep-freed)" in printed, done.output
    changes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "seq_len": 16, "vocab_size": 50}
    shape = infer_beside_peers.shape_of(preset("gpt2", changes).model)
    # The best of five: 11 tokens take longer than one even on a busy machine.
    job = {"folder": str(tmp_path), "shape": shape, "threads": 1, "prompt": 5, "new": 11, "repeats": 5}
    asked = partial(peer_process.ask_peer, sys.executable, program="peer_inference")
    assert "transformers" in asked("models", job)["peers"]
    found = asked("measure", job | {"peer": "transformers", "dtype": "float32", "requests": 2})
    assert 0 < found["first"] < found["whole"]
