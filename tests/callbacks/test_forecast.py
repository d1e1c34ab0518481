from types import SimpleNamespace

import pytest
from distgpt.callbacks.forecast import Forecast, predicted
from distgpt.core.config import ModelConfig, TrainConfig
from distgpt.core.train.progress import Progress

# Bits per byte of --within at these fractions of the training time, and at the end.
CURVES = {
    "Python, 1m": ([1.964, 1.878, 1.800], 1.75),
    "Python, 2m": ([1.947, 1.857, 1.752], 1.60),
    "documentation, 2m": ([2.273, 2.226, 2.157], 2.04),
    "JSON, code and prose, 1m": ([2.105, 2.043, 1.965], 1.91),
    "bundled corpus, 1m": ([3.037, 2.745, 2.508], 2.24),
    "Shakespeare, 1m": ([2.135, 2.118, 2.083], 2.05),
    "names, 1m": ([3.635, 3.022, 2.066], 1.80),
    "bundled tales, 1m": ([0.963, 0.876, 0.550], 0.33),
    "bundled tales, 2m": ([0.425, 0.256, 0.202], 0.166),
}


LATE = ("names, 1m", "bundled tales, 1m")  # fall faster after a quarter


@pytest.mark.parametrize("name", CURVES)
def test_predictions_of_measured_curves(name):
    bits, last = CURVES[name]
    curve = [*zip((0.125, 0.25, 0.5), bits, strict=True)]
    for points in (curve,) if name in LATE else (curve, curve[:2]):
        expected, error = predicted(points)
        assert (1 - error) * expected <= last <= (1 + error) * expected
    assert predicted(curve)[1] < (0.11 if last > 1.9 else 0.22)


def test_rising_loss_predicts_the_lowest():
    assert predicted([(0.25, 2.0), (0.5, 2.2)])[0] == 2.2
    assert predicted([(0.25, 2.2), (0.5, 2.0)])[0] < predicted([(0.25, 2.1), (0.5, 2.0)])[0] < 2.0


def forecast(budget, notes, progress):
    """Return a forecast of a run on two ranks, which waits for evaluations."""
    run = SimpleNamespace(
        progress=progress,
        settings=TrainConfig(steps=100),
        comm=SimpleNamespace(size=2),
        model=SimpleNamespace(config=ModelConfig(), kernels=None),
        budget=budget,
        bits_per_byte=lambda loss: loss,
        report=SimpleNamespace(note=notes.append),
    )
    return Forecast(run, SimpleNamespace(spans=[], count=1))


@pytest.mark.parametrize("is_timed", [True, False])
def test_each_mark_is_predicted_once_also_after_a_resume(is_timed):
    budget, notes, progress = SimpleNamespace(elapsed=0.0 if is_timed else None), [], Progress()
    progress.count_evaluation(8.0)  # before the first step
    one = forecast(budget, notes, progress)
    for step in range(1, 101):
        progress.step = step
        if step % 10 == 1 and step > 1:  # evaluated after the step before
            progress.count_evaluation(3 - step / 100)
        if step == 45:
            one, saved = forecast(budget, notes, progress), one.state()
            one.load(saved)
        assert one.after_step(None) == {}
        if is_timed:
            budget.elapsed = 0.2 + 0.8 * step / 100  # the text took the first fifth
    assert [point[0] for point in one.curve] == pytest.approx([0.2, 0.3, 0.5], abs=0.03)
    assert [note.split()[2] for note in notes] == [f"{point[0]:.0%}" for point in one.curve[1:]]
    bits, error = one.predicted
    assert one.predicted == predicted(one.curve)
    assert f"{bits * (1 - error):.2f} to {bits * (1 + error):.2f}" in notes[-1]
