"""Equal GPUs of a job choose alike: what was timed on the first of them holds for all, and for no other."""

import json
from dataclasses import replace

import numpy as np
import pytest
from devices import needs_the_processor
from distgpt.core.comm.agree import gather_bytes
from distgpt.core.comm.api import SerialComm
from distgpt.core.data.batches import ArrayTokens, Batches
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.optim import AdamW
from distgpt.core.ops.kernels import Kernels
from distgpt.gpu.device import CupyDevice
from distgpt.gpu.kernels import CudaKernels
from distgpt.gpu.matmul import LtMatmul, share_autotuning
from fakecupy import FakeCupy
from hostgpu import HostDevice, host_lt
from steps import build_step
from test_cublaslt import ANY, IN_PARTS, PLAIN, WIDEST
from test_cuda_model import SMALL, TRAIN, training
from threadranks import on_all_ranks

from models import VARIANTS

KIND, OTHER = (replace(PLAIN, m=64, n=64, k=k) for k in (64, 32))


class Gpu:
    """A rank's GPU that finds one algorithm the fastest, and has recorded a matmul."""

    def __init__(self, favourite, name="Fake GPU", kinds=(KIND,), way=0, tf32=False):
        self.device = CupyDevice(0, xp=FakeCupy())
        self.device.name = name
        self.favourite, self.device.times = favourite, self.times
        self.matmuls = LtMatmul(host_lt(self.device.xp), self.device, tf32)
        self.stand_in = self.matmuls._lt._library
        zeros = self.device.zeros
        self.arrays = {
            kind: [zeros(shape, np.dtype(np.float32)) for shape in ((64, 64), (64, kind.k), (kind.k, 64))]
            for kind in kinds
        }
        ways = [lambda: None, lambda: None]
        for kind in kinds:
            self.device.times = lambda works: [float(way != i) for i in range(2)]
            self.device.fastest(kind, ways)
        self.device.times = self.times
        self.recorded = 0
        self.work = self.device.record(self._work)
        for _ in range(2):
            self.work()

    def _work(self):
        self.recorded += self.device.recording
        for kind, arrays in self.arrays.items():
            self.matmuls.run(kind, *arrays)

    def times(self, works):
        seconds = []
        for work in works:
            work()
            self.device.synchronize()
            seconds.append(float(self.stand_in.algorithm != self.favourite))
        return seconds

    def ran(self):
        """The algorithm that the recorded work runs now, and how often it was recorded so far."""
        for _ in range(2):
            self.work()
        self.device.synchronize()
        return self.stand_in.algorithm, self.recorded


def agree(gpus):
    def act(comm):
        gpu = gpus[comm.rank]
        share_autotuning(lambda own: gather_bytes(comm, own), gpu.device, gpu.matmuls)

    on_all_ranks(len(gpus), act)


def test_equal_gpus_take_the_algorithm_of_the_first_and_record_it():
    gpus = [Gpu(IN_PARTS), Gpu(WIDEST, name="Older GPU"), Gpu(ANY), Gpu(ANY, name="Older GPU"), Gpu(IN_PARTS)]
    assert [gpu.ran() for gpu in gpus] == [(IN_PARTS, 1), (WIDEST, 1), (ANY, 1), (ANY, 1), (IN_PARTS, 1)]
    agree(gpus)
    assert [gpu.ran() for gpu in gpus] == [(IN_PARTS, 1), (WIDEST, 1), (IN_PARTS, 2), (WIDEST, 2), (IN_PARTS, 1)]
    agree(gpus)
    assert [gpu.ran()[1] for gpu in gpus] == [1, 1, 2, 2, 1]


def test_gpus_with_another_library_or_other_arithmetic_choose_for_themselves():
    other, gpus = Gpu(ANY), [Gpu(WIDEST), Gpu(ANY, tf32=True)]
    other.matmuls.about = (1, False)
    gpus.append(other)
    before = [gpu.ran() for gpu in gpus]
    agree(gpus)
    assert [gpu.ran() for gpu in gpus] == before


def test_what_the_first_has_not_timed_is_chosen_by_each():
    gpus = [Gpu(WIDEST), Gpu(ANY, kinds=(KIND, OTHER))]
    agree(gpus)
    chosen = [gpu.matmuls.chosen() for gpu in gpus]
    assert [len(each) for each in chosen] == [1, 2]
    assert gpus[1].ran() == (ANY, 2)  # the other kind comes last
    assert chosen[0].items() <= chosen[1].items()


def test_the_way_to_compute_something_is_the_firsts_too():
    gpus = [Gpu(ANY, way=1), Gpu(ANY, way=0, kinds=(KIND, OTHER)), Gpu(ANY, way=0, name="Older GPU")]
    agree(gpus)
    assert [gpu.device.choices for gpu in gpus] == [{KIND: 1}, {KIND: 1, OTHER: 0}, {KIND: 0}]
    assert [gpu.ran()[1] for gpu in gpus] == [1, 2, 1]


def test_what_the_library_refused_to_start_is_nobodys_choice():
    one = Gpu(ANY)
    (plan,) = one.matmuls._plans.values()
    assert len(plan.candidates) == 5
    assert not one.matmuls.adopt(dict.fromkeys(one.matmuls.chosen(), "00" * 64))


class Asked(Kernels):
    """Notes what `agree` is given, and when."""

    def __init__(self):
        super().__init__("float64")
        self.asked = []

    def agree(self, gather):
        self.asked.append(gather(b"own"))


def test_a_run_asks_once_after_its_first_step():
    k = Asked()
    model = Model(Architecture(SMALL), k)
    model.allocate_master_weights()
    model.initialise(3)
    text = np.arange(400, dtype=np.int32) % SMALL.vocab_size
    batches = Batches(ArrayTokens(text), SMALL.seq_len, TRAIN.batch_size, TRAIN.seed, True)
    work = build_step(AdamW(model, TRAIN), SerialComm(), replace(TRAIN, recompute="mlp"))
    found = []
    for step in range(3):
        work.launch(step, batches)
        found.append(list(k.asked))
    assert found == [[], [[b"own"]], [[b"own"]]]


@pytest.mark.slow
@needs_the_processor
def test_a_run_goes_on_with_the_choices_of_another_and_learns_the_same():
    def run(favourite, others):
        """Losses and norms of a run, what it chose, and what it told others."""
        on = HostDevice(deterministic=False)
        k = CudaKernels(on, LtMatmul(host_lt(on.xp), on), "float32")
        told = []

        def times(works):
            for work in works:
                work()
            return [float(i != favourite % len(works)) for i in range(len(works))]

        def agree(gather):
            CudaKernels.agree(k, lambda own: told.append(own) or [*others, own])

        on.times, k.agree = times, agree
        outcomes = training(k, replace(VARIANTS["gpt2"], seq_len=8), TRAIN)[2]
        return outcomes, (k.matmuls.chosen(), on.choices), told

    expected, first, told = run(-1, [])
    alone, own, _ = run(0, [])
    got, chosen, _ = run(0, told)
    assert own[0] != first[0] and own[1] != first[1]
    (told,) = map(json.loads, told)
    for name, algorithm in told["algorithms"].items():
        assert chosen[0].get(name, algorithm) == algorithm
    assert len(told["algorithms"].items() & chosen[0].items()) > 5 and chosen[1] == first[1]
    for outcomes in (alone, got):
        np.testing.assert_allclose(outcomes, expected, rtol=1e-4)
