"""What `distgpt bench stages` decides without running anything: workload, verdicts, words, the folder."""

import io
import json
import os
from pathlib import Path

import pytest

from distgpt.cluster.jobs.launchers import find_launcher
from distgpt.core.base.errors import UsageError
from distgpt.core.config import STAGES, RunConfig
from distgpt.core.config.presets import preset
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.core.model.optim import learning_rate
from distgpt.measure.compare.agreement import MEASURED, TOLERANCES, differences
from distgpt.measure.compare.result import DONE, Comparison, render_terminal
from distgpt.measure.compare.run import Progress
from distgpt.measure.compare.stages import (
    INTERRUPTED,
    CompareOptions,
    Folder,
    Measured,
    Runnable,
    Runner,
)
from distgpt.measure.compare.workload import Opening, find_workload, look_at_data

# Steps that are judged in float32.
OF_ADAMW, OF_MUON = (MEASURED[optimizer, "float32"].steps for optimizer in ("adamw", "muon"))


def stage(name, losses, dtype="float32", tokens=None):
    inference = tokens and {"tokens": tokens, "text": "", "seconds": 1.0, "process_s": 1.0}
    return Measured(name, 1, dtype, losses=losses, inference=inference)


def test_the_default_is_the_beginning_of_the_projects_run_at_its_rates():
    workload = find_workload(None, None, {}, full=False)
    whole = preset("gpt-mini")
    assert workload.is_projects and workload.run.train.steps == 21
    for step in range(21):
        rate = learning_rate(whole.train, step)
        assert learning_rate(workload.run.train, step) == pytest.approx(rate, rel=1e-12)
    full = find_workload(None, None, {}, full=True)
    assert full.run == whole


def test_published_figures_stand_beside_the_same_workload_only():
    for flags, is_projects in (
        ({"dtype": "float64", "seed": 3}, True),
        ({"steps": 50}, True),
        ({"steps": 21}, False),  # the whole schedule in 21 steps
        ({"steps": 51}, False),
        ({"n_layer": 2}, False),
        ({"batch_size": 8}, False),
        ({"lr": 1e-3}, False),
    ):
        workload = find_workload("gpt-mini", None, flags, full=False)
        assert workload.is_projects == is_projects, flags
        assert workload.run.train.steps == flags.get("steps", workload.run.train.steps)


def test_another_workload_is_as_train_takes_it(tmp_path):
    (tmp_path / "mine.toml").write_text('preset = "microgpt"\nsteps = 7\n')
    workload = find_workload(None, tmp_path / "mine.toml", {"seed": 5}, full=False)
    assert workload.run == preset("microgpt", {"steps": 7, "seed": 5}) and not workload.is_projects
    with pytest.raises(UsageError):
        find_workload(None, None, {"n_layer": 2}, full=True)


def test_a_loss_beyond_the_tolerance_is_found_with_its_step():
    limit = TOLERANCES["float32"]
    serial = stage("serial", [5.0, 4.0, 3.0, 2.0])
    inside = stage("mpi", [5.0, 4.0 * (1 + limit / 2), 3.0, 2.0])
    outside = stage("cuda", [5.0, 4.0, 3.0 * (1 - 2 * limit), 4.0])
    one, other = differences([serial, inside, outside], None)
    assert one.agrees and one.step == 2 and one.largest == pytest.approx(limit / 2, rel=1e-3)
    assert not other.agrees and (other.first, other.step, other.largest) == (3, 4, 1.0)
    assert "step 3" in other.sentence() and "stage cuda" in other.sentence()
    assert differences([serial, outside], 2.0)[0].agrees


def test_what_is_not_finite_agrees_with_nothing():
    for first, second in (([1.0, None], [1.0, 1.0]), ([1.0, 1.0], [1.0, None]), ([None], [None])):
        (found,) = differences([stage("serial", first), stage("mpi", second)], None)
        assert not found.agrees and found.largest is None and found.first == len(first), (first, second)
        assert "not finite" in found.sentence()
        json.dumps([found.largest, found.at_first], allow_nan=False)


def test_of_a_long_run_the_steps_are_judged_that_rounding_has_been_measured_over():
    serial, apart = stage("serial", [1.0] * 60), stage("mpi", [1.0] * 50 + [1.5] * 10)
    (found,) = differences([serial, apart], None)
    assert found.agrees and (found.judged, found.largest, found.largest_of_all) == (50, 0.0, 0.5)
    (found,) = differences([serial, apart], 0.1)
    assert not found.agrees and found.first == 51
    apart.losses[-1] = None
    (found,) = differences([serial, apart], None)
    assert not found.agrees and found.first == 60


def test_of_muon_fewer_steps_are_judged_in_float32():
    losses = [1.0] * OF_MUON + [1.001]
    for optimizer, dtype, agrees in (
        ("muon", "float32", True),
        ("adamw", "float32", False),
        ("muon", "float64", False),
    ):
        (found,) = differences(
            [stage("serial", [1.0] * 9, dtype), stage("mpi", losses, dtype)], None, optimizer
        )
        assert found.agrees == agrees, (optimizer, dtype)
    losses[OF_MUON - 1] = 1.001
    assert not differences([stage("serial", [1.0] * 9), stage("mpi", losses)], None, "muon")[0].agrees


def test_the_first_that_got_farthest_is_compared_with():
    died, mpi, cuda = stage("serial", [2.0]), stage("mpi", [2.0, 1.0]), stage("cuda", [2.0, 1.5])
    found = differences([died, mpi, cuda], None)
    shown = [(each.stage, each.reference, each.steps) for each in found]
    assert shown == [("serial", "mpi", 1), ("cuda", "mpi", 2)] and not found[1].agrees


def comparison(*stages, state=DONE):
    options = CompareOptions(find_workload(None, None, {}, full=False))
    return Comparison(options, Runnable(STAGES, {}, None), Opening("", 1, 1, 1), {}, list(stages), state)


def test_of_the_steps_that_are_not_judged_their_own_difference_is_reported():
    for early, late, words in (
        (1e-6, 1e-3, "Later ones differ by up to 1.0e-03: in a long run rounding grows."),
        (1e-5, 1e-7, "Later ones differ by up to 1.0e-07."),
    ):
        apart = stage("mpi", [1.0 + early] * OF_ADAMW + [1.0 + late] * 10)
        assert comparison(stage("serial", [1.0] * 60), apart).verdict().endswith(f" {words}")


def test_the_verdict_tells_of_an_interruption_and_of_what_was_wrong_by_then():
    serial, mpi = stage("serial", [1.0, 1.0]), stage("mpi", [1.0, 2.0])
    verdict = comparison(serial, mpi, state=INTERRUPTED).verdict()
    assert "stage mpi: the loss of step 2 differs" in verdict and "Interrupted: " in verdict
    assert comparison(serial, mpi).passed is False and comparison(serial).passed is None
    same = serial, stage("mpi", [1.0, 1.0])
    assert comparison(*same).passed and comparison(*same, state=INTERRUPTED).passed is False


def test_the_coarser_format_counts_and_the_first_that_ran_is_compared_with():
    nothing, mpi = stage("serial", []), stage("mpi", [2.0, 1.0], tokens=[1, 2, 3])
    cuda = stage("cuda", [2.0, 1.01], "bfloat16", tokens=[1, 9, 3])
    (found,) = differences([nothing, mpi, cuda], None)
    assert found.reference == "mpi" and found.tolerance == TOLERANCES["bfloat16"] and found.agrees
    assert (found.same_text, found.text_differs_at) == (False, 2)
    assert "1.00e-02" in render_terminal(comparison(nothing, mpi, cuda))


def test_the_words_for_slurm(tmp_path, monkeypatch):
    srun = tmp_path / "srun"
    srun.write_text("#!/bin/sh\n")
    srun.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    workload = find_workload(None, None, {}, full=False)
    options = CompareOptions(workload, None, 8, "srun --mpi=pmix", None, 4, "bfloat16")
    runner = Runner(options, find_launcher(options.launcher, None), Folder(Path("out")), print, print)
    command, typed = runner.command("mpi", ["train", "--out", "out/mpi"])
    assert command[:4] == [str(srun), "-n", "8", "--mpi=pmix"]
    words = "distgpt train --stage mpi --dtype float32 --threads 4 --out out/mpi"
    assert command[-9:] == words.split()[1:] and typed == f"srun -n 8 --mpi=pmix {words}"
    for name, words in (
        ("mpi-cuda", "srun -n 8 --mpi=pmix distgpt train --stage mpi-cuda --dtype bfloat16"),
        ("serial", "distgpt train --stage serial --dtype float32 --threads 4"),
    ):
        assert runner.command(name, ["train"])[1] == words


def test_only_an_own_folder_is_used_again(tmp_path):
    folder = Folder(tmp_path / "out")
    folder.refuse_foreign()
    folder.begin("steps = 1\n", "prompt")
    folder.save({"state": "done"})
    (folder.path / "mpi" / "checkpoints").mkdir(parents=True)
    (folder.path / "notes.txt").write_text("mine")
    folder.refuse_foreign()
    folder.begin("steps = 2\n", "another")
    assert not (folder.path / "mpi").exists() and folder.prompt.read_text() == "another"
    assert (folder.path / "notes.txt").read_text() == "mine"
    for text in ("", "{}", "[]"):
        folder.result.write_text(text)
        with pytest.raises(UsageError, match="choose another"):
            folder.refuse_foreign()


def test_the_prompt_is_the_beginning_of_the_text(tmp_path):
    text = "Der Müller 'mahlt' – zäh. " * 100
    (tmp_path / "text.txt").write_text(text)
    for kind in ("byte", "char", "word"):
        run = RunConfig().with_values({"data": str(tmp_path / "text.txt"), "tokenizer": kind})
        opening, tokenizer = look_at_data(run), load_tokenizer(kind, text)
        ids = tokenizer.encode(opening.prompt).tolist()
        assert ids == tokenizer.encode(text).tolist()[: len(ids)] and 255 <= len(ids) <= 256, kind
        assert opening.vocabulary == tokenizer.size and opening.corpus_tokens == len(tokenizer.encode(text))


def test_progress_is_one_line_per_stage_on_a_terminal_and_few_plain_ones_elsewhere():
    for live in (True, False):
        screen = io.StringIO()
        screen.isatty = lambda live=live: live
        progress = Progress(screen)
        progress.phase("mpi", "training")
        for step in range(1, 50):
            progress.line(f"step {step}/50  loss 1.2345  lr 1e-3")
        progress.line("a text that the model wrote \x1b[2J")
        progress.done(stage("mpi", [1.0]))
        progress.close()
        shown = screen.getvalue()
        assert "wrote" not in shown and ("step 49/50" in shown) == live
        assert live or shown.count("\n") == 2


def test_the_page_says_what_its_speeds_are_and_what_cannot_be_seen():
    serial = stage("serial", [1.0])
    serial.inference = {"tokens": [1, 1], "text": "  \n", "seconds": 1.0, "process_s": 1.0}
    serial.training = {"train_s": 30.0, "tokens_per_s": 4000.0, "peak_memory": [1 << 20], "process_s": 31.0}
    text = render_terminal(comparison(serial))
    assert "nothing to be seen" in text and "mpi-cuda*" in text
    table, note = text.index("Measured here"), " ".join(text.split()).index("median training step")
    assert table < note
