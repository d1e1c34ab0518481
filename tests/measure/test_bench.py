"""`distgpt bench`: training, sums over ranks, and stages that must agree."""

import json
import os
import threading
from functools import partial
from itertools import product
from types import SimpleNamespace

import click
import pytest
from benching import RANKS, SMALL, STAGE, peak_here
from click.testing import CliRunner
from distgpt.cluster.jobs.processes import Ended
from distgpt.commands.bench import allreduce as allreduce_line
from distgpt.commands.bench import compare_stages
from distgpt.commands.bench import train as command_line
from distgpt.commands.options import set_by_user, settings, stage_options
from distgpt.core.base.errors import DataError, DisagreementError, DistgptError, NonFiniteError, UsageError
from distgpt.core.config import GpuConfig, RunConfig
from distgpt.core.config.presets import preset
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.core.model.counts import operations
from distgpt.core.model.model import Architecture
from distgpt.core.model.optim import learning_rate
from distgpt.measure import jobs
from distgpt.measure import stages as compared
from distgpt.measure.bench import infer, train
from distgpt.measure.bench.allreduce import AllreduceOptions, algorithms, array_size, blocks, measure
from distgpt.measure.bench.infer import InferOptions
from distgpt.measure.bench.train import TrainOptions
from threadranks import on_all_ranks

from conftest import ci_ranks, distgpt, inside, needs_mpi, refused, slow_ranks, succeeded, summary


def bench(*words):
    return CliRunner().invoke(command_line, list(map(str, words)))


@pytest.mark.ci
@pytest.mark.ranks
def test_bench_reports_speed_memory_and_peak_share(tmp_path, monkeypatch):
    monkeypatch.setattr(train, "peak_gflops", partial(train.peak_gflops, seconds=0.05))
    monkeypatch.setattr(jobs, "ask", peak_here)
    done = bench(*SMALL, "--threads", 1, "--stage", STAGE, "--name", "found", "--out", tmp_path)
    assert done.exit_code == 0, done.output
    found = json.loads((tmp_path / "train-found.json").read_text())
    (row,) = found["rows"]
    assert found["kind"] == "train" and f"{found['peak_gflops']:,.0f} GFLOP/s" in done.stdout
    assert row["steps"] == 6 and row["threads"] == 1 and row["ranks"] == len(row["peak_memory"]) == RANKS
    changes = {"n_layer": 1, "n_embd": 16, "n_head": 2, "seq_len": 16, "bias": False, "vocab_size": 256}
    counted = operations(Architecture(preset("tiny", changes).model))
    assert found["operations_per_token"] == counted.forward + counted.backward
    assert row["mfu"] * found["peak_gflops"] * 1e9 == pytest.approx(row["tokens_per_s"] * found["operations_per_token"])
    assert 0 < row["mfu"] < 1 and row["peak_memory"][0] > 1e6 and row["first_loss"] > 5


def test_bench_passes_stage_options_to_children():
    command = click.command()(stage_options(settings(lambda **given: given)))
    every = GpuConfig(graphs=False, allreduce="host", deterministic=True, tf32=True)
    for stage, threads, gpu in (("serial", 3, GpuConfig()), ("mpi-cuda", None, every)):
        words = list(map(str, TrainOptions(stage, threads, gpu).stage_words()))
        at = words.index("--dtype")
        assert words[at + 1] == "float32"
        given = command.main(words[:at] + words[at + 2 :], standalone_mode=False)
        assert (given["stage"], given["threads"], given["gpu"]) == (stage, threads, gpu)
        assert not set_by_user({key: given[key] for key in given.keys() - {"stage", "threads", "gpu"}})


def test_bench_passes_settings_to_the_run(tmp_path, monkeypatch):
    seen = []

    def stop(what, config, out, words, launcher, ranks):
        seen.append((config, words))
        raise DistgptError("enough")

    monkeypatch.setattr(jobs, "train", stop)
    words = "--no-bias --untied --set shift_windows=true --set verify_data=false --lr 0.5 --threads 1"
    assert str(bench(*words.split(), "--dtype", "float64", "--out", tmp_path).exception) == "enough"
    ((config, words),) = seen
    changes = {"bias": False, "tied": False, "shift_windows": True, "verify_data": False, "lr": 0.5}
    assert config == preset("tiny", {**changes, "dtype": "float64", "steps": 20, "warmup": 4})
    assert words == ["--stage", "serial", "--dtype", "float64", "--threads", 1]


INTERNAL = "distgpt: internal error\nTraceback\nKeyError: 'x'\n"
KILLED = "= EXIT CODE: 9\nYOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\nThis is\n"


@pytest.mark.parametrize("code, errors, output, kind, words", [
    (65, "distgpt: no file\n", "", DataError, "no file"),
    (76, "distgpt: the loss is nan\nAbort(76)\n", "", NonFiniteError, "the loss is nan"),
    (-9, "", "", DistgptError, "the run failed (killed by SIGKILL)"),
    (9, "", KILLED, DistgptError, "the run failed (exit code 9): a rank ended: Killed (signal 9)"),
    (2, "usage: x\n", "", DistgptError, "the run failed (exit code 2): usage: x"),
    (70, INTERNAL, "", DistgptError, "the run failed (exit code 70): KeyError: 'x'"),
])  # fmt: skip
def test_failed_child_reports_its_error(code, errors, output, kind, words):
    with pytest.raises(DistgptError) as caught:
        jobs.raise_failure(Ended(code, output, errors, 1.0), "the run")
    assert (type(caught.value), str(caught.value)) == (kind, words)


def test_child_results_are_parsed(tmp_path):
    assert jobs.answer(Ended(0, 'warming up\n{"a": 1}\n{"a": 2}\nbye\n', "", 1.0), "it") == {"a": 2}
    with pytest.raises(DataError, match="it printed no result: sorry"):
        jobs.answer(Ended(0, "none\n", "sorry\n", 1.0), "it")
    lines = '{"step": 1, "loss": 2.0}\n{"step": 1, "val_loss": 1}\n{"step": 2, "loss": null}\n{"lo'
    (tmp_path / "metrics.jsonl").write_text(lines)
    assert jobs.read_losses(tmp_path) == [2.0, None] and jobs.read_losses(tmp_path / "none") == []
    with pytest.raises(DataError, match=r"summary\.json"):
        jobs.read_summary(tmp_path)


@pytest.mark.ci
def test_infer_bench_has_a_row_per_case(tmp_path, capsys):
    how = {"preset": "tiny", "threads": 1, "dtypes": ("int8",), "requests": (1, 2)}
    infer.bench(InferOptions(**how, prompt=5, new=4, out=tmp_path))
    rows = json.loads((tmp_path / "infer-tiny.json").read_text())["rows"]
    assert [(row["requests"], row["dtype"]) for row in rows] == [(1, "int8"), (2, "int8")]
    for row in rows:
        assert 0 < row["first"] < row["whole_s"]
        assert row["prefill"] == pytest.approx(row["requests"] * 5 / row["first"])
        assert row["decode"] == pytest.approx(row["requests"] * 3 / (row["whole_s"] - row["first"]))
    assert "decode, tokens/s" in capsys.readouterr().out
    with pytest.raises(UsageError, match="the context of 128"):
        infer.bench(InferOptions(preset="tiny", prompt=100, new=64, out=tmp_path))


QUICK = ["--sizes", "8,1K,300K", "--repeats", "4", "--seconds", "60"]


def check_rows(found, algorithms, ranks):
    sizes = [8, 1024, 300 * 1024]
    assert [(row["bytes"], row["algorithm"]) for row in found["rows"]] == [*product(sizes, algorithms)]
    for row in found["rows"]:
        assert 0 < row["min_seconds"] <= row["seconds"] and row["repeats"] in (3, 4)
        assert row["bytes_per_s"] == pytest.approx(row["bytes"] / row["seconds"])
        assert row["bus_bytes_per_s"] == pytest.approx(row["bytes_per_s"] * 2 * (ranks - 1) / ranks)


@pytest.mark.ci
@needs_mpi
def test_allreduce_bench_starts_ranks_and_saves(tmp_path):
    result = succeeded("bench", "allreduce", *QUICK, "--out", tmp_path, by=distgpt)
    assert "300 KiB" in result.stdout and "2 ranks on one machine" in result.stdout
    found = json.loads((tmp_path / "allreduce-mpi-2.json").read_text())
    assert found["kind"] == "allreduce" and found["environment"]["cores"] > 0 and found["library"]
    check_rows(found, ["allreduce", "shared memory"], 2)
    assert found["nodes"] == 1 and found["cores_per_rank"] == min(2, found["environment"]["cores"] / 2)


@ci_ranks
def test_launched_allreduce_bench_uses_its_ranks(tmp_path):
    words = [*QUICK, "--algorithms", "allreduce", "--json", "--name", "three", "--out", tmp_path]
    (line,) = succeeded("bench", "allreduce", *words, ranks=3, by=distgpt).stdout.splitlines()
    found = json.loads(line)
    assert found["ranks"] == found["ranks_per_node"] == 3
    check_rows(found, ["allreduce"], 3)
    assert json.loads((tmp_path / "allreduce-three.json").read_text())["rows"] == found["rows"]


@ci_ranks
@pytest.mark.parametrize("words, code, named", [
    (["--ranks", "1"], 2, "at least 2 ranks"),
    (["--sizes", "8,x"], 2, "'x'"),
    (["--sizes", "6"], 2, "multiple of 4"),
    (["--max-bytes", "2T"], 2, "'2T'"),
    (["--launcher", "no-such-launcher"], 2, "no-such-launcher"),
    (["--launcher", "false", "--out", "file"], 74, "file"),
    (["--algorithms", "nccl", "--ranks", "2"], 2, "'nccl' is not one of allreduce"),  # printed once
    *((["--seconds", seconds], 2, "--seconds") for seconds in ("inf", "nan", "0")),
])  # fmt: skip
def test_allreduce_bench_rejects_mistakes_before_measuring(words, code, named, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    result = CliRunner().invoke(allreduce_line, ["--out", "out", *words])
    error = result.exception
    found = (error.exit_code, str(error)) if isinstance(error, DistgptError) else (result.exit_code, result.stderr)
    assert found[0] == code and named in found[1] and not list(tmp_path.rglob("*.json"))


def test_allreduce_sizes():
    assert AllreduceOptions(sizes="64K,8,64K").array_sizes() == [65536, 8]
    assert AllreduceOptions(max_bytes="2K").array_sizes() == [8, 32, 128, 512, 2048]
    assert AllreduceOptions(max_bytes="4").array_sizes() == [4]
    assert AllreduceOptions().array_sizes()[-2:] == [128 << 20, 256 << 20]
    assert [array_size("", words) for words in ("8", "64K", "2 MiB", "1g")] == [8, 65536, 2 << 20, 1 << 30]


def test_wrong_sum_raises_on_every_rank():
    def act(comm, is_wrong):
        comm.sum = (lambda array: None) if is_wrong else comm.sum
        return measure_without_mpi(comm, "allreduce", AllreduceOptions(sizes="8,4096", repeats=3, seconds=5))

    assert [len(rows) for rows in on_all_ranks(2, lambda comm: act(comm, False))] == [2, 2]
    for error in on_all_ranks(2, lambda comm: act(comm, True)):
        assert isinstance(error, DistgptError) and "is wrong" in str(error)


def measure_without_mpi(comm, names, plan, memory=1 << 40):
    here = SimpleNamespace(name="mpi", comm=comm, device=None, on_gpu=False, free_memory=lambda: (memory, "here"))
    table, _ = algorithms(here, names)
    return list(measure(here, table, plan))


def test_allreduce_bench_skips_sizes_beyond_memory_or_time():
    plan = AllreduceOptions(sizes="64,1024,1048576", repeats=3, seconds=5)
    for rank_0_has, largest in ((1 << 40, 1 << 20), (3 << 10, 1024)):
        rows = on_all_ranks(
            2, lambda comm, has=rank_0_has: measure_without_mpi(comm, "allreduce", plan, 1 << 40 if comm.rank else has)
        )[1]
        assert max(row["bytes"] for row in rows if "left_out" not in row) == largest
        assert [row["left_out"] for row in rows if row["bytes"] > largest] == ["memory"] * (largest == 1024)
    hurried = AllreduceOptions(sizes="1048576,64,16777216", repeats=3, seconds=0.0)  # the first has time in any case
    rows = on_all_ranks(2, lambda c: measure_without_mpi(c, "allreduce", hurried))[0]
    assert [row.get("left_out") for row in rows] == [None, "time", "time"]
    uneven = {"ranks": 3, "nodes": 2, "library": "M", "left_out": {"nccl": "none here"}, "rows": []}
    table, *notes = blocks(uneven | {"not_measured": rows[1:]})
    assert table.caption == "3 ranks on 2 hosts, M" and notes == [
        "nccl skipped: none here",
        "allreduce not measured, because there is not enough time: 64 B, 16 MiB",
    ]


@pytest.mark.parametrize("ranks, per_node", [(2, 2), (4, 2)])
def test_all_ranks_skip_unshareable_sizes(ranks, per_node, monkeypatch):
    here, real = threading.local(), os.ftruncate

    def too_large_on_the_last_node(descriptor, size):
        if here.rank == ranks - per_node and size > 1 << 20:
            raise OSError(28, "No space left on device")
        real(descriptor, size)

    def act(comm):
        here.rank = comm.rank
        name = "shared memory" if per_node == ranks else "hierarchical"
        return measure_without_mpi(comm, name, AllreduceOptions(sizes="64,4194304,128", repeats=3, seconds=5))

    monkeypatch.setattr(os, "ftruncate", too_large_on_the_last_node)
    for rows in on_all_ranks(ranks, act, per_node):
        assert [row["bytes"] for row in rows] == [64, 4194304, 128]
        assert [row.get("left_out") for row in rows] == [None, "memory", None]


LIMIT = compared.TOLERANCES["float32"]


def stage(name, losses, dtype="float32", tokens=None):
    inference = tokens and {"tokens": tokens, "text": " \n", "seconds": 1.0}
    return compared.Measured(name, 1, dtype, losses=losses, inference=inference)


def test_workload_defaults_to_first_steps_of_preset(tmp_path):
    (_, run), whole = compared.find_workload(None, None, {"dtype": "float64"}, full=False), preset("gpt-mini")
    assert run.train.steps == 21
    for step in range(21):
        rate = learning_rate(whole.train, step)
        assert learning_rate(run.train, step) == pytest.approx(rate, rel=1e-12)
    assert compared.find_workload(None, None, {}, full=True)[1] == whole
    assert compared.find_workload("gpt-mini", None, {"steps": 50}, full=False)[1] == whole
    (tmp_path / "mine.toml").write_text('preset = "microgpt"\nsteps = 7\n')
    _, run = compared.find_workload(None, tmp_path / "mine.toml", {"seed": 5}, full=False)
    assert run == preset("microgpt", {"steps": 7, "seed": 5})
    with pytest.raises(UsageError):
        compared.find_workload(None, tmp_path / "mine.toml", {}, full=True)


def test_differences_find_first_step_beyond_tolerance():
    serial = stage("serial", [5.0, 4.0, 3.0, 2.0])
    inside = stage("mpi", [5.0, 4.0 * (1 + LIMIT / 2), 3.0, 2.0])
    outside = stage("cuda", [5.0, 4.0, 3.0 * (1 - 2 * LIMIT), 4.0])
    one, other = compared.differences([serial, inside, outside], None)
    assert one.agrees and one.step == 2 and one.largest == pytest.approx(LIMIT / 2, rel=1e-3)
    assert not other.agrees and (other.first, other.step, other.largest) == (3, 4, 1.0)
    assert "step 3" in other.sentence() and "stage cuda" in other.sentence()
    assert compared.differences([serial, outside], 2.0)[0].agrees


@pytest.mark.parametrize("first, second", [([1.0, None], [1.0, 1.0]), ([1.0, 1.0], [1.0, None]), ([None], [None])])
def test_nonfinite_loss_never_agrees(first, second):
    (found,) = compared.differences([stage("serial", first), stage("mpi", second)], None)
    assert not found.agrees and found.largest is None and found.first == len(first)
    assert "not finite" in found.sentence()
    json.dumps([found.largest, found.at_first], allow_nan=False)


@pytest.mark.parametrize(
    "optimizer, dtype, judged", [("adamw", "float32", 50), ("muon", "float32", 8), ("muon", "float64", 50)]
)
def test_differences_judge_only_measured_steps(optimizer, dtype, judged):
    serial, apart = stage("serial", [1.0] * 60, dtype), stage("mpi", [1.0] * 60, dtype)
    apart.losses[judged:] = [1.5] * (60 - judged)
    (found,) = compared.differences([serial, apart], None, optimizer)
    assert found.agrees and (found.judged, found.largest, found.largest_later) == (judged, 0.0, 0.5)
    (found,) = compared.differences([serial, apart], 0.1, optimizer)
    assert not found.agrees and found.first == judged + 1
    apart.losses[-1] = None
    assert compared.differences([serial, apart], None, optimizer)[0].first == 60
    apart.losses[judged - 1] = 1.5
    assert compared.differences([serial, apart], None, optimizer)[0].first == judged


def test_reference_has_most_steps_and_coarser_tolerance():
    died, mpi = stage("serial", [2.0]), stage("mpi", [2.0, 1.0])
    cuda = stage("cuda", [2.0, 1.01], "bfloat16")
    one, other = compared.differences([stage("mpi-cuda", []), died, mpi, cuda], None)
    assert (one.stage, one.reference, one.steps) == ("serial", "mpi", 1)
    assert (other.reference, other.tolerance, other.agrees) == ("mpi", compared.TOLERANCES["bfloat16"], True)


def comparison(*stages, state=compared.DONE):
    options = compared.CompareOptions(*compared.find_workload(None, None, {}, full=False))
    return compared.Comparison(options, {}, "", {}, list(stages), state)


def test_verdicts():
    serial, same = stage("serial", [1.0] * 60), stage("mpi", [1.0] * 60)
    assert comparison(serial, same).passed and "in a single bit" in comparison(serial, same).verdict()
    late = stage("mpi", [1.0 + 1e-6] * 50 + [1.001] * 10)
    assert comparison(serial, late).verdict().endswith("Later ones differ by up to 1.0e-03.")
    assert comparison(serial, same, state=compared.INTERRUPTED).passed is False and comparison(serial).passed is None
    wrong = comparison(serial, stage("mpi", [1.0, 2.0]), state=compared.INTERRUPTED)
    assert wrong.passed is False and "the loss of step 2 differs" in wrong.verdict()
    assert "Interrupted: " in wrong.verdict()


def test_only_comparison_directories_are_reused(tmp_path):
    compared.refuse_foreign(tmp_path / "out")
    compared.refuse_foreign(tmp_path)
    for text in ("", "{}", "[]"):
        (tmp_path / "compare.json").write_text(text)
        with pytest.raises(UsageError, match="choose another"):
            compared.refuse_foreign(tmp_path)
    (tmp_path / "compare.json").write_text('{"format": "distgpt-comparison"}')
    compared.refuse_foreign(tmp_path)


def test_prompt_is_the_start_of_the_text(tmp_path):
    text = "Der Müller 'mahlt' – zäh. " * 100
    (tmp_path / "text.txt").write_text(text)
    for kind in ("byte", "char", "word"):
        run = RunConfig().with_values({"data": str(tmp_path / "text.txt"), "tokenizer": kind})
        tokenizer = load_tokenizer(kind, text)
        ids = tokenizer.encode(compared.find_prompt(run)).tolist()
        assert ids == tokenizer.encode(text).tolist()[: len(ids)] and 255 <= len(ids) <= 256, kind


_MODEL = "--preset tiny-adamw --n-layer 2 --n-head 2 --n-embd 16 --seq-len 16"
MODEL = f"{_MODEL} --batch-size 8 --threads 1".split()
SHORT = [*MODEL, "--steps", "12", "--stages", "serial,mpi"]


def result_in(folder):
    return json.loads((folder / "compare.json").read_text())


@ci_ranks
def test_stages_agree_and_report_is_anonymous(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result, folder = compare(*SHORT, "--out", "both"), tmp_path / "both"
    assert result.exit_code == 0, result.output
    report = result_in(folder)
    assert report["state"] == "done" and report["passed"]
    serial, mpi = report["stages"]
    assert [serial["stage"], mpi["stage"], mpi["ranks"], mpi["threads"]] == ["serial", "mpi", 2, 1]
    (difference,) = report["differences"]
    for stage in (serial, mpi):
        lines = (folder / stage["stage"] / "metrics.jsonl").read_text().splitlines()
        assert stage["losses"] == [json.loads(line)["loss"] for line in lines] and len(lines) == 12
        about = summary(folder / stage["stage"])
        assert stage["training"]["train_s"] == about["train_s"]
        assert len(stage["training"]["peak_memory"]) == stage["ranks"]
        faster = about["tokens_per_s"] / serial["training"]["tokens_per_s"]
        for shown in (
            f"{about['train_s']:,.2f} {about['first_step_s']:,.2f} {faster:.2f}",
            f"{about['loss']:.4f} {about['train_bits_per_byte']:.4f}",
        ):
            assert shown in " ".join(result.stdout.split())
        assert len(stage["inference"]["tokens"]) == 30
    relative = [abs(a - b) / abs(b) for a, b in zip(mpi["losses"], serial["losses"], strict=True)]
    assert difference["largest"] == max(relative) <= difference["tolerance"] < 1e-3
    assert difference["agrees"] and mpi["inference"]["tokens"] == serial["inference"]["tokens"]
    for word in ("tokens/s", "× serial", f"{difference['largest']:.2e}"):
        assert word in result.stdout
    text = (folder / "compare.json").read_text()
    assert str(tmp_path) not in text and os.uname().nodename not in text and not list(folder.glob("*/checkpoints"))


def compare(*words):
    return CliRunner().invoke(compare_stages, list(map(str, words)))


@slow_ranks
def test_stages_that_disagree_or_die_are_reported(tmp_path, monkeypatch):
    changes = {("serial", "infer"): ["--max-new-tokens", "-1"], ("mpi", "train"): ["--lr", "0.1"]}
    plain = jobs.start

    def start(words, *how):
        return plain([*words, *changes.get((words[words.index("--stage") + 1], words[0]), [])], *how)

    monkeypatch.setattr(jobs, "start", start)
    result = compare(*SHORT, "--steps", "3", "--ranks", "1", "--out", tmp_path / "out", "--json")
    assert isinstance(result.exception, DisagreementError) and result.exception.exit_code == 1
    words = str(result.exception)
    assert words.startswith("stage mpi: the loss of step 2 differs from serial's by 0.")
    assert "; stage serial died in inference: " in words
    report = json.loads(result.stdout)
    assert not report["passed"] and report["differences"][0]["first"] == 2
    serial, mpi = report["stages"]
    assert "inference" in serial["failed"] and serial["training"] and serial["inference"] is None
    assert not mpi["failed"] and len(mpi["losses"]) == 3 and len(mpi["inference"]["tokens"]) == 30


@ci_ranks
def test_interrupted_stages_keep_measurements(tmp_path, monkeypatch):
    plain, out = jobs.start, tmp_path / "out"

    def start(words, *how):
        if "mpi" in words:
            raise KeyboardInterrupt
        return plain(words, *how)

    monkeypatch.setattr(jobs, "start", start)
    result = inside("bench", "stages", *SHORT, "--steps", "3", "--out", out)
    assert result.returncode == 130 and str(out) in result.stderr.splitlines()[-1]
    report = result_in(out)
    assert report["state"] == "interrupted" and not report["passed"] and "Interrupted" in result.stdout
    assert [len(stage["losses"]) for stage in report["stages"]] == [3, 0]


@ci_ranks
def test_incomparable_stages_are_rejected_before_work(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hide this machine's GPUs
    (tmp_path / "file").write_text("")
    for words, code, named in (
        ((*MODEL, "--stages", "serial,cuda"), 2, "cuda"),
        ((*SHORT, "--out", tmp_path / "file" / "out"), 74, str(tmp_path / "file")),
        *((("--tolerance", wrong), 2, "--tolerance") for wrong in ("inf", "nan")),
    ):
        result = inside("bench", "stages", "--out", tmp_path / "out", *words)
        assert result.returncode == code and named in result.stderr, words
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    refused(distgpt("bench", "stages", cwd=tmp_path, env={"PMI_SIZE": "2", "PMI_RANK": "0"}), 2, "one process")
    result = compare(*MODEL, "--steps", "2", "--stages", "serial", "--out", tmp_path / "out")
    assert result.exit_code == 0 and "nothing to compare it with" in result.stdout
    assert result_in(tmp_path / "out")["passed"] is None
