"""What `distgpt bench stages` decides without running anything: workload, verdicts, words, the folder."""

import json

import pytest
from distgpt.core.base.errors import UsageError
from distgpt.core.config import RunConfig
from distgpt.core.config.presets import preset
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.core.model.optim import learning_rate
from distgpt.measure.stages import (
    DONE,
    INTERRUPTED,
    TOLERANCES,
    CompareOptions,
    Comparison,
    Measured,
    differences,
    find_prompt,
    find_workload,
    judged_steps,
    refuse_foreign,
)
from distgpt.measure.stages import _table as stages_table
from distgpt.show.page import terminal

# Steps that are judged in float32.
OF_ADAMW, OF_MUON = (judged_steps(optimizer, "float32") for optimizer in ("adamw", "muon"))
LIMIT = TOLERANCES["float32"]


def stage(name, losses, dtype="float32", tokens=None):
    inference = tokens and {"tokens": tokens, "text": " \n", "seconds": 1.0}
    return Measured(name, 1, dtype, losses=losses, inference=inference)


def test_the_default_is_the_beginning_of_the_projects_run_and_others_are_as_train_takes_them(tmp_path):
    (_, run), whole = find_workload(None, None, {"dtype": "float64"}, full=False), preset("gpt-mini")
    assert run.train.steps == 21
    for step in range(21):
        rate = learning_rate(whole.train, step)
        assert learning_rate(run.train, step) == pytest.approx(rate, rel=1e-12)
    assert find_workload(None, None, {}, full=True)[1] == whole
    assert find_workload("gpt-mini", None, {"steps": 50}, full=False)[1] == whole
    (tmp_path / "mine.toml").write_text('preset = "microgpt"\nsteps = 7\n')
    _, run = find_workload(None, tmp_path / "mine.toml", {"seed": 5}, full=False)
    assert run == preset("microgpt", {"steps": 7, "seed": 5})
    with pytest.raises(UsageError):
        find_workload(None, tmp_path / "mine.toml", {}, full=True)


def test_the_table_shows_the_first_step_and_fits_the_terminal(monkeypatch):
    found = {"train_s": 12.5, "first_step_s": 9.5, "train_bits_per_byte": 3.6884, "peak_memory": [319e6]}
    serial, mpi = stage("serial", [5.0], tokens=[1]), stage("mpi", [5.0], tokens=[1])
    serial.training, mpi.training = found | {"tokens_per_s": 1000.0}, found | {"tokens_per_s": 1700.0}
    comparison = Comparison(CompareOptions("a", preset("microgpt")), {}, "", {}, [serial, mpi])
    for width, names in ((80, "first s  × serial  tokens/s    loss"), (100, "infer s  tokens/s   MB    loss    bits")):
        monkeypatch.setenv("COLUMNS", str(width))
        _, head, _, *rows = terminal([stages_table(comparison)]).splitlines()[:5]
        assert names in head and len(head) <= width
        assert "9.50" in rows[0] and "1.70" in rows[1]


def test_a_loss_beyond_the_tolerance_is_found_with_its_step():
    serial = stage("serial", [5.0, 4.0, 3.0, 2.0])
    inside = stage("mpi", [5.0, 4.0 * (1 + LIMIT / 2), 3.0, 2.0])
    outside = stage("cuda", [5.0, 4.0, 3.0 * (1 - 2 * LIMIT), 4.0])
    one, other = differences([serial, inside, outside], None)
    assert one.agrees and one.step == 2 and one.largest == pytest.approx(LIMIT / 2, rel=1e-3)
    assert not other.agrees and (other.first, other.step, other.largest) == (3, 4, 1.0)
    assert "step 3" in other.sentence() and "stage cuda" in other.sentence()
    assert differences([serial, outside], 2.0)[0].agrees


@pytest.mark.parametrize("first, second", [([1.0, None], [1.0, 1.0]), ([1.0, 1.0], [1.0, None]), ([None], [None])])
def test_a_loss_that_is_not_finite_agrees_with_nothing(first, second):
    (found,) = differences([stage("serial", first), stage("mpi", second)], None)
    assert not found.agrees and found.largest is None and found.first == len(first)
    assert "not finite" in found.sentence()
    json.dumps([found.largest, found.at_first], allow_nan=False)


@pytest.mark.parametrize(
    "optimizer, dtype, judged", [("adamw", "float32", OF_ADAMW), ("muon", "float32", OF_MUON), ("muon", "float64", 50)]
)
def test_steps_are_judged_over_which_rounding_was_measured(optimizer, dtype, judged):
    serial, apart = stage("serial", [1.0] * 60, dtype), stage("mpi", [1.0] * 60, dtype)
    apart.losses[judged:] = [1.5] * (60 - judged)
    (found,) = differences([serial, apart], None, optimizer)
    assert found.agrees and (found.judged, found.largest, found.largest_later) == (judged, 0.0, 0.5)
    (found,) = differences([serial, apart], 0.1, optimizer)
    assert not found.agrees and found.first == judged + 1
    apart.losses[-1] = None
    assert differences([serial, apart], None, optimizer)[0].first == 60
    apart.losses[judged - 1] = 1.5
    assert differences([serial, apart], None, optimizer)[0].first == judged


def test_the_first_with_most_steps_is_the_reference_and_the_coarser_format_counts():
    died, mpi = stage("serial", [2.0]), stage("mpi", [2.0, 1.0])
    cuda = stage("cuda", [2.0, 1.01], "bfloat16")
    one, other = differences([stage("mpi-cuda", []), died, mpi, cuda], None)
    assert (one.stage, one.reference, one.steps) == ("serial", "mpi", 1)
    assert (other.reference, other.tolerance, other.agrees) == ("mpi", TOLERANCES["bfloat16"], True)


def comparison(*stages, state=DONE):
    options = CompareOptions(*find_workload(None, None, {}, full=False))
    return Comparison(options, {}, "", {}, list(stages), state)


def test_verdicts():
    serial, same = stage("serial", [1.0] * 60), stage("mpi", [1.0] * 60)
    assert comparison(serial, same).passed and "in a single bit" in comparison(serial, same).verdict()
    late = stage("mpi", [1.0 + 1e-6] * OF_ADAMW + [1.001] * 10)
    assert comparison(serial, late).verdict().endswith("Later ones differ by up to 1.0e-03.")
    assert comparison(serial, same, state=INTERRUPTED).passed is False and comparison(serial).passed is None
    wrong = comparison(serial, stage("mpi", [1.0, 2.0]), state=INTERRUPTED)
    assert wrong.passed is False and "the loss of step 2 differs" in wrong.verdict()
    assert "Interrupted: " in wrong.verdict()


def test_only_an_own_folder_is_used_again(tmp_path):
    refuse_foreign(tmp_path / "out")
    refuse_foreign(tmp_path)
    for text in ("", "{}", "[]"):
        (tmp_path / "compare.json").write_text(text)
        with pytest.raises(UsageError, match="choose another"):
            refuse_foreign(tmp_path)
    (tmp_path / "compare.json").write_text('{"format": "distgpt-comparison"}')
    refuse_foreign(tmp_path)


def test_the_prompt_is_the_beginning_of_the_text(tmp_path):
    text = "Der Müller 'mahlt' – zäh. " * 100
    (tmp_path / "text.txt").write_text(text)
    for kind in ("byte", "char", "word"):
        run = RunConfig().with_values({"data": str(tmp_path / "text.txt"), "tokenizer": kind})
        tokenizer = load_tokenizer(kind, text)
        ids = tokenizer.encode(find_prompt(run)).tolist()
        assert ids == tokenizer.encode(text).tolist()[: len(ids)] and 255 <= len(ids) <= 256, kind
