"""`distgpt bench stages`: workload, verdicts and directory; real stages in new processes, and failures."""

import json
import os

import pytest
from click.testing import CliRunner
from distgpt.commands.bench import compare_stages
from distgpt.core.base.errors import DisagreementError, UsageError
from distgpt.core.config import RunConfig
from distgpt.core.config.presets import preset
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.core.model.optim import learning_rate
from distgpt.measure import jobs
from distgpt.measure import stages as compared
from distgpt.show.page import terminal

from conftest import ci_ranks, distgpt, inside, refused, slow_ranks, summary

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


def test_table_shows_first_step_and_fits_terminal(monkeypatch):
    found = {"train_s": 12.5, "first_step_s": 9.5, "train_bits_per_byte": 3.6884, "peak_memory": [319e6]}
    serial, mpi = stage("serial", [5.0], tokens=[1]), stage("mpi", [5.0], tokens=[1])
    serial.training, mpi.training = found | {"tokens_per_s": 1000.0}, found | {"tokens_per_s": 1700.0}
    comparison = compared.Comparison(compared.CompareOptions("a", preset("microgpt")), {}, "", {}, [serial, mpi])
    for width, names in ((80, "first s  × serial  tokens/s    loss"), (100, "infer s  tokens/s   MB    loss    bits")):
        monkeypatch.setenv("COLUMNS", str(width))
        _, head, _, *rows = terminal([compared._table(comparison)]).splitlines()[:5]
        assert names in head and len(head) <= width and "9.50" in rows[0] and "1.70" in rows[1]


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
