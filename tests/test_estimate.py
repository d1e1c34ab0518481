"""What a run is said to take: against published sizes, the memory it takes, its checkpoint, and its speed."""

import json
import time
from statistics import median

import pytest
from conftest import SMALL, distgpt, refused
from foreignmodels import change_json

from distgpt.config.presets import preset
from distgpt.errors import DataError, UsageError
from distgpt.kernels.cpu import CpuKernels
from distgpt.measure.estimate.estimate import Question, estimate, number
from distgpt.measure.estimate.page import gib
from distgpt.measure.estimate.timing import Timing, _Bench, _seconds, enough_sequences, measure
from distgpt.model.counts import operations, parameters
from distgpt.model.model import Architecture
from distgpt.training.sizing import divisors, needed

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
}
UNMEASURED = ["--no-measure", "--json"]
MODERN = {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "bias": False, "tied": False}


def asked(*args, **how):
    result = distgpt("estimate", *args, **how)
    assert result.returncode == 0, result.stderr
    return result


def facts(*args, **how):
    return json.loads(asked(*args, "--json", **how).stdout)


def quiet(text):
    return None


def question(name, stage="serial", **more):
    values = {
        key: more.pop(key) for key in list(more) if key in ("dtype", "seq_len", "grad_accum", "recompute")
    }
    return Question(preset(name, values), stage, measured=False, **more)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_of_the_published_models(name):
    model = Architecture(preset(name).model)
    counted = parameters(model)
    assert counted.total == PUBLISHED[name]
    assert counted.total + counted.padding == model.layout.size


@pytest.mark.parametrize("changes", [{}, MODERN, {"positions": "none", "vocab_multiple": 1}])
def test_operations_are_those_of_the_products(changes):
    """Written out for a model whose sizes are all different primes, or nearly."""
    sizes = {"n_layer": 3, "n_head": 1, "n_embd": 22, "mlp_width": 31, "seq_len": 7, "vocab_size": 53}
    model = Architecture(preset("tiny", sizes, {"mlp": "gelu"}, changes).model)
    found = operations(model)
    sides = 2 if changes is MODERN else 1
    assert found.layers == 3 * 2 * (22 * 66 + 22 * 22 + 22 * sides * 31 + 31 * 22)
    assert found.head == 2 * 53 * 22
    seen = [t + 1 for t in range(7)]  # by each position
    assert found.attention * 7 == 3 * sum(2 * 2 * 22 * count for count in seen)
    assert found.backward == 2 * found.forward


@pytest.mark.parametrize("name", [*PUBLISHED, "gpt2-modern"])
def test_the_memory_is_what_sizing_counts(name):
    asked = question(name, grad_accum=512, recompute="mlp")
    memory = estimate(asked, quiet)["memory"]
    need = needed(asked.run, CpuKernels(threads=2), 1, assessed=True)
    kinds = ("weights", "gradients", "moments", "activations", "logits", "validation")
    assert sum(memory[kind] for kind in kinds) == memory["total"] == need.total
    assert memory["weights"] == need.weights and memory["validation"] == need.assessment
    assert memory["gradients"] == 4 * (Architecture(asked.run.model).layout.size + 1)
    assert memory["logits"] == 512 * 50304 * 4  # of half the sequence, as those of all are above 128 MiB
    hows = next(row for row in memory["choices"] if row["sequences"] == 1)
    assert hows["none"] > hows["mlp"] == need.total > hows["block"]


@pytest.mark.parametrize("dtype, weights, others", [("bfloat16", 6, 4), ("float32", 4, 4), ("float64", 8, 8)])
def test_a_gpu_stage_is_counted_without_a_gpu(dtype, weights, others):
    found = estimate(question("gpt2", "cuda", dtype=dtype, grad_accum=8, gpu_memory=1000.0), quiet)
    size = found["parameters"]["total"] + found["parameters"]["padding"]
    memory = found["memory"]
    assert memory["weights"] == weights * size
    assert memory["gradients"] == others * (size + 1)
    assert 2 * others * size <= memory["moments"] < 2 * others * size + 10_000
    assert memory["logits"] < 1.02 * 2**30 and not memory["trouble"]  # up to whole tiles of rows
    assert memory["recompute"] == "none" and found["batch"]["sequences_per_rank_and_round"] == 64


def test_paper_has_the_sizes_of_a_device():
    import sys
    from pathlib import Path

    sys.path.append(str(Path(__file__).parent / "gpu"))
    from hostdevice import HostDevice
    from hostmatmul import HostMatmul

    from distgpt.gpu.accelerator import ON_PAPER, kernels_on_paper
    from distgpt.gpu.kernels import CudaKernels

    device = HostDevice(multiprocessors=ON_PAPER)
    run = preset("gpt-mini", {"vocab_size": 300, "grad_accum": 1, "recompute": "none"})
    for dtype in ("float32", "bfloat16"):
        real = CudaKernels(device, HostMatmul(device), dtype)
        assert needed(run, kernels_on_paper(dtype), 1) == needed(run, real, 1)


def test_a_run_that_does_not_fit_is_described_all_the_same():
    small = estimate(question("gpt2-xl", "cuda", gpu_memory=8.0), quiet)
    assert "are free" in small["memory"]["trouble"] and small["memory"]["recompute"] == "block"
    assert small["batch"]["sequences_per_rank_and_round"] == 1
    endless = estimate(question("gpt2-xl", "mpi-cuda", ranks=8), quiet)
    assert not endless["memory"]["trouble"]


def test_batch_length_and_exchange_follow_from_the_settings():
    shape = ["--stage", "mpi", "--ranks", "4", "--threads", "1", "--grad-accum", "16"]
    found = facts("--preset", "gpt2", *shape, "--tokens", "10B", "--no-measure")
    batch = found["batch"]
    assert batch["tokens_per_step"] == 1 << 19 and batch["sequences_per_rank_and_round"] == 8
    assert found["steps"] == 19074 and found["tokens"] == 19074 << 19  # the last step is whole
    assert found["allreduce_bytes"] == 4 * (PUBLISHED["gpt2"] + 36_096 + 1)
    assert found["time"]["rate_per_rank"] is None


def test_the_checkpoint_is_as_large_as_it_is_said(trained):
    found = facts(*SMALL, *UNMEASURED)
    files = [path for path in (trained / "checkpoints").glob("*30/*") if path.suffix == ".safetensors"]
    headers = 8192 * len(files)
    assert (
        found["checkpoint_bytes"]
        < sum(path.stat().st_size for path in files)
        < found["checkpoint_bytes"] + headers
    )
    weights = (trained / "weights.safetensors").stat().st_size
    assert found["weights_file_bytes"] < weights < found["weights_file_bytes"] + 8192


def test_a_given_rate_makes_the_time():
    found = facts(
        "--preset", "gpt2", "--stage", "mpi-cuda", "--ranks", "8", "--rate", "5e5", "--steps", "1000"
    )
    took = found["time"]
    assert (took["source"], took["rate"]) == ("given", 4e6)
    assert took["step_s"] == pytest.approx((1 << 19) / 4e6)
    assert took["total_s"] == pytest.approx(1000 * took["step_s"])
    flops = found["flops_per_token"]
    assert took["flops_per_s_and_rank"] == pytest.approx(5e5 * (flops["forward"] + flops["backward"]))


def test_what_layers_take_is_the_difference_between_models(monkeypatch):
    """Each step and each update takes a while of its own, and something for each layer."""

    def seconds(work):
        work()
        layers = work.__self__._optimizer.model.config.n_layer
        update = 0.5 + 0.25 * layers
        return update if work.__name__ == "update" else update + 2 + layers

    monkeypatch.setattr("distgpt.measure.estimate.timing._seconds", seconds)
    monkeypatch.setattr("distgpt.measure.estimate.timing.SECONDS", 0)
    for n_layer, measured in ((2, (2,)), (3, (3,)), (20, (1, 3))):
        sizes = {"vocab_size": 9, "n_layer": n_layer, "n_embd": 8, "n_head": 1, "seq_len": 8}
        timing = measure(preset("tiny", sizes, {"recompute": "mlp"}), CpuKernels(), 4)
        assert timing.cuts == measured
        assert timing.token_s * 4 * 8 == pytest.approx(2 + n_layer)
        assert timing.update_s == pytest.approx(0.5 + 0.25 * n_layer)


def test_the_measured_rate_is_that_of_the_whole_model(monkeypatch):
    """Against steps of all layers on the same machine; the bounds allow for others who use it."""
    monkeypatch.setattr("distgpt.measure.estimate.timing.SECONDS", 0.5)
    changes = {"vocab_size": 2000, "n_layer": 7, "grad_accum": 2}
    run = preset("tiny", changes, {"batch_size": 16, "recompute": "mlp"})
    kernels = CpuKernels(threads=1)
    timing = measure(run, kernels, enough_sequences(run, kernels, 8))
    assert timing.sequences == 8
    bench = _Bench(run, kernels)
    bench.step()
    seconds = median(_seconds(bench.step) for _ in range(9))
    assert 0.4 < timing.rate(16 * 128) * seconds / (16 * 128) < 2.5


def test_rounds_share_one_update():
    timing = Timing(token_s=0.01, update_s=5.0, cuts=(1, 3), sequences=1, steps=3)
    assert timing.rate(1000) == 1000 / 15 and timing.rate(100_000) == pytest.approx(100, rel=0.01)


def test_the_page_says_it_all():
    page = asked(*SMALL, "--steps", "7", "--n-layer", "4").stdout
    for word in (
        "parameters",
        "attention",
        "7 steps, 896 tokens",
        "gradients",
        "checkpoint",
        "tokens/s",
        "measured",
    ):
        assert word in page, word
    page = asked("--preset", "gpt2", "--stage", "mpi-cuda", "--ranks", "2", "--no-measure").stdout
    assert "124,439,808" in page and "--gpu-memory" in page and "--rate" in page


@pytest.mark.parametrize(
    "text, value", [("5", 5), ("2k", 2000), ("1.5M", 1_500_000), ("10B", 10**10), ("1e9", 10**9)]
)
def test_numbers_of_tokens(text, value):
    assert number(text) == value


@pytest.mark.parametrize("text", ["", "B", "0", "-3M", "ten", "1e999", "nan", "10Q"])
def test_what_is_no_number_of_tokens(text):
    with pytest.raises(UsageError, match="--tokens"):
        number(text)


@pytest.mark.parametrize(
    "args, words",
    [
        (["--ranks", "2"], ["serial", "--ranks"]),
        (["--gpu-memory", "80"], ["--gpu-memory"]),
        (["--stage", "cuda", "--gpu-memory", "nan"], ["--gpu-memory is nan", "at least"]),
        (["--stage", "cuda", "--gpu-memory", "inf"], ["--gpu-memory is inf", "at most"]),
        (["--rate", "nan"], ["--rate is nan"]),
        (["--rate", "inf"], ["--rate is inf"]),
        (["--threads", "0"], ["--threads is 0: it must be at least 1"]),
        (["--rate", "5", "--measure"], ["--rate", "--measure"]),
        (["--stage", "mpi", "--ranks", "3"], ["batch_size 16", "3 rank"]),
        (["--stage", "cuda", "--threads", "2"], ["--threads"]),
        (["--dtype", "bfloat16"], ["bfloat16"]),
        (["--preset", "gpt3"], ["gpt3"]),
    ],
)
def test_what_makes_no_sense_is_refused(args, words):
    refused(distgpt("estimate", *args), 2, *words)


def test_measuring_without_a_gpu_is_refused():
    from distgpt.gpu.probe import probe

    if probe().driver is not None:
        pytest.skip("there is a GPU")
    refused(distgpt("estimate", "--preset", "gpt2", "--stage", "cuda", "--measure"), 2, "--measure", "NVIDIA")


def test_it_is_one_process_even_for_many_ranks():
    refused(distgpt("estimate", env={"PMI_SIZE": "2"}), 2, "estimate is for one process", "launched as 2")


def sized(**values):
    return estimate(Question(preset("tiny", values), "serial", measured=False), quiet)


def test_the_vocabulary_is_the_tokenizers_and_a_text_is_read_only_for_its_words(tmp_path):
    unreadable = tmp_path / "text"
    unreadable.write_bytes(b"\xff")
    for word, size in (("auto", 256), ("byte", 256), ("gpt2", 50257)):
        counted = sized(data=str(unreadable), tokenizer=word)["parameters"]["kinds"]
        assert counted["embedding"] == size * 128
    with pytest.raises(DataError, match="not UTF-8"):
        sized(data=str(unreadable), tokenizer="char")
    unreadable.write_text("abca")
    assert sized(data=str(unreadable), tokenizer="char")["parameters"]["kinds"]["embedding"] == 3 * 128


@pytest.mark.parametrize("held_out", [False, True])
def test_shards_tell_the_vocabulary_and_whether_there_is_something_to_validate_on(tmp_path, held_out):
    (tmp_path / "text.txt").write_text("one two three " * 200)
    aside = ["--val-fraction", "0.2" if held_out else "0"]
    out = tmp_path / "shards"
    made = distgpt("data", "prepare", tmp_path / "text.txt", "--tokenizer", "byte", "--out", out, *aside)
    assert made.returncode == 0, made.stderr
    for shard in out.glob("*.npy"):
        shard.unlink()  # the manifest is all that is needed
    change_json(out / "manifest.json", vocab_size=300)  # other than that of bytes
    found = sized(data=str(out))
    assert found["parameters"]["kinds"]["embedding"] == 300 * 128
    assert (found["memory"]["validation"] > 0) == held_out


@pytest.mark.parametrize("number", [1, 2, 12, 49, 97, 3600])
def test_divisors_are_all_there_are(number):
    assert divisors(number) == [n for n in range(1, number + 1) if number % n == 0]


def test_a_batch_of_any_size_is_answered_at_once():
    begun = time.perf_counter()
    assert sized(batch_size=10**9)["batch"]["sequences"] == 10**9
    assert time.perf_counter() - begun < 60


def test_numbers_below_each_other_have_as_many_digits():
    sizes = (20.5, 30, 99.94, 99.96, 1023)
    shown = ["20.5 MiB", "30.0 MiB", "99.9 MiB", "100 MiB", "1,023 MiB"]
    assert [gib(round(size * 2**20)) for size in sizes] == shown
    assert gib(1023 << 10) == "1,023 KiB"
