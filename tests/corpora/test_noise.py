import numpy as np
import pytest
from distgpt.core.config import RunConfig
from distgpt.core.data.batches import ArrayTokens, Batches
from distgpt.corpora.noise import NoisyBatches

from conftest import SMALL, inside, refused

IDS = np.random.default_rng(2).integers(0, 500, 3000, np.uint32)


def batches(kind, seed=3):
    run = RunConfig().with_values({"seq_len": 50, "batch_size": 40, "input_noise": 0.2, "seed": seed})
    return kind.of_run(ArrayTokens(IDS), run)


def filled(of, step, which=slice(0, 40)):
    x, y = (np.zeros((which.stop - which.start, 50), np.int32) for _ in range(2))
    of.fill(step, which, x, y)
    return x, y


def test_noise_replaces_inputs_by_tokens_of_their_sequence():
    plain, noisy = batches(Batches), batches(NoisyBatches)
    changed, places = [], set()
    for step in range(20):
        (x, y), (noisy_x, noisy_y) = filled(plain, step), filled(noisy, step)
        assert np.array_equal(y, noisy_y)
        assert all(set(row) <= set(own) for row, own in zip(noisy_x, x, strict=True))
        changed.append((x != noisy_x).mean())
        places.add((x != noisy_x).tobytes())
    assert len(places) == 20
    # One replacement in 50 chooses the token itself, and a few find an equal one.
    assert np.mean(changed) == pytest.approx(0.2 * 49 / 50, abs=0.01)


def test_noise_depends_only_on_seed_and_number_of_the_sequence():
    noisy, whole = batches(NoisyBatches), filled(batches(NoisyBatches), 7)[0]
    assert np.array_equal(filled(noisy, 7, slice(10, 30))[0], whole[10:30])
    noisy.skipped = 7
    assert np.array_equal(filled(noisy, 0)[0], whole)
    assert not np.array_equal(filled(batches(NoisyBatches, seed=4), 7)[0], whole)


def test_noise_and_packing_are_rejected(tmp_path):
    words = ["train", *SMALL, "--set", "input_noise=0.1", "--pack", "--out", tmp_path / "none"]
    refused(inside(*words), 2, "input_noise and --pack")
