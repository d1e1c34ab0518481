from itertools import product

import pytest
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.ops.kernels import Kernels
from mean_loss import MeanLoss
from threadranks import on_all_ranks

from models import VARIANTS, build, one_by_one, sequences_for


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
