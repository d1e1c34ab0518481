"""`distgpt estimate`: model sizes, memory, checkpoints and speed."""

import json
from types import SimpleNamespace

import pytest
from distgpt.core.base.errors import DataError
from distgpt.core.config import RunConfig, parse_toml
from distgpt.core.config.presets import preset
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.data.textfile import resolve_data
from distgpt.core.model.counts import operations, parameters
from distgpt.core.model.model import FLAG_COUNT, Architecture
from distgpt.core.train.memory import divisors, needed
from distgpt.core.train.parallel_strategy import Strategy
from distgpt.gpu.probe import probe
from distgpt.measure import estimate as estimating
from distgpt.measure.estimate import Question, estimate, measure, render_terminal
from foreignmodels import change_json

from conftest import SMALL, inside, refused

PUBLISHED = {"gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200}
MODERN = {"norm": "rmsnorm", "mlp": "swiglu", "positions": "rope", "bias": False, "tied": False}


def question(name, stage="serial", **more):
    asked = {key: more.pop(key) for key in list(more) if key in Question.__slots__}
    return Question(preset(name, more), stage, **{"measured": False, **asked})


def estimated(name, stage="serial", **more):
    return estimate(question(name, stage, **more), lambda text: None)


@pytest.mark.parametrize("name, total", PUBLISHED.items())
def test_parameters_match_published_models(name, total):
    model = Architecture(preset(name).model)
    counted = parameters(model)
    assert counted.total == total and counted.total + counted.padding == model.layout.size


def test_estimate_gives_ranks_a_thread_per_core(monkeypatch):
    """The node has 128 cores with two CPUs each and eight ranks."""
    opened = []
    layout = SimpleNamespace(share=lambda cores, ranks, grants=None: int(cores / 2))
    monkeypatch.setattr(estimating, "affinity", lambda: layout)
    monkeypatch.setattr(estimating, "usable_cores", lambda: range(256))
    monkeypatch.setattr(estimating, "open_stage", lambda name, threads, gpu: opened.append(threads) or 1 / 0)
    with pytest.raises(ZeroDivisionError):
        estimated("gpt2", "mpi", ranks=8)
    assert opened == [16]


def test_operations_count_matmuls():
    sizes = {"n_layer": 3, "n_head": 1, "n_embd": 22, "mlp_width": 31, "seq_len": 7, "vocab_size": 53}
    for sides, qkv, changes in (
        (1, 66, {}),
        (2, 66, MODERN),
        (1, 66, {"positions": "none", "vocab_multiple": 1}),
        (1, 44, {"n_head": 2, "n_kv_head": 1, "positions": "none"}),
        (1, 66, {"window": 4, "full_every": 0, "positions": "none"}),
    ):
        found = operations(Architecture(preset("tiny", sizes, {"mlp": "gelu"}, changes).model))
        assert found.layers == 3 * 2 * (22 * qkv + 22 * 22 + 22 * sides * 31 + 31 * 22), changes
        assert found.head == 2 * 53 * 22, changes
        seen = [min(t + 1, changes.get("window", 7)) for t in range(7)]  # by each position
        assert found.attention == 3 * sum(2 * 2 * 22 * count for count in seen) // 7, changes
        assert found.backward == 2 * found.forward, changes


def test_estimate_needs_no_gpu():
    for dtype, weights, others in (("bfloat16", 6, 4), ("float32", 4, 4), ("float64", 8, 8)):
        found = estimated("gpt2", "cuda", dtype=dtype, grad_accum=8, gpu_memory=1000.0)
        size = found["parameters"]["total"] + found["parameters"]["padding"]
        memory = found["memory"]
        assert memory["weights"] == weights * size, dtype
        assert memory["gradients"] == others * (size + FLAG_COUNT), dtype
        assert 2 * others * size <= memory["moments"] < 2 * others * size + 10_000, dtype
        assert not memory["trouble"], dtype
        assert memory["recompute"] == "none" and found["batch"]["sequences_per_rank_and_round"] == 64


def test_estimate_counts_exchange_buffers_and_weight_shards():
    def exchange(stage="mpi-cuda", **how):
        found = estimated("gpt2", stage, ranks=2, grad_accum=8, gpu_memory=1000.0, **how)
        assert found["memory"]["total"] > found["memory"]["exchange"]
        return found["memory"]["exchange"]

    assert exchange(gradient_dtype="bfloat16", dtype="bfloat16") == 64 << 20
    assert exchange(grad_sync="sharded") == 64 << 20 and exchange(grad_sync="allreduce") == 0
    assert exchange(gradient_dtype="bfloat16", outer_every=100) == 64 << 20
    for ranks in (2, 4):  # sharded moments shard full-precision weights
        found = estimated("gpt2", "mpi-cuda", dtype="bfloat16", grad_sync="sharded", ranks=ranks, grad_accum=8)
        size = found["parameters"]["total"] + found["parameters"]["padding"]
        assert 0 <= found["memory"]["weights"] - (2 + 4 / ranks) * size < 4 * 4096 * ranks, ranks


def test_imagined_gpu_has_sizes_of_a_device():
    from distgpt.gpu.device import CupyDevice
    from distgpt.gpu.kernels import CudaKernels
    from distgpt.gpu.stage import ESTIMATED_MULTIPROCESSORS, kernels_for_estimate
    from fakecupy import FakeCupy

    device = CupyDevice(0, xp=FakeCupy(multiprocessors=ESTIMATED_MULTIPROCESSORS))
    run = preset("gpt-mini", {"vocab_size": 300, "grad_accum": 1, "recompute": "none"})
    one = Strategy(run.train, 1)
    for dtype in ("float32", "bfloat16"):
        imagined, real = kernels_for_estimate(dtype, device.memory()[1]), CudaKernels(device, None, dtype)
        assert needed(run, imagined, one) == needed(run, real, one), dtype


def test_estimate_describes_runs_that_do_not_fit():
    small = estimated("gpt2-xl", "cuda", gpu_memory=8.0)
    assert " free" in small["memory"]["trouble"] and small["memory"]["recompute"] == "block"
    assert small["batch"]["sequences_per_rank_and_round"] == 1
    assert "not enough: " in render_terminal("gpt2-xl", small)
    assert not estimated("gpt2-xl", "mpi-cuda", ranks=8)["memory"]["trouble"]  # memory unknown


def test_estimate_derives_batch_steps_and_allreduce():
    found = estimated("gpt2", "mpi", ranks=4, threads=1, grad_accum=16, tokens=10**10)
    batch = found["batch"]
    assert batch["tokens_per_step"] == 1 << 19 and batch["sequences_per_rank_and_round"] == 8
    assert found["steps"] == 19074 and found["tokens"] == 19074 << 19  # the last step is whole
    memory, (*kinds, total) = found["memory"], estimating.MEMORY
    assert found["allreduce_bytes"] == memory["gradients"] == 4 * (PUBLISHED["gpt2"] + 36_096 + FLAG_COUNT + 4)
    assert sum(memory[kind] for kind in kinds) == memory[total] and memory["validation"] > 0
    assert memory["weights"] == 4 * (PUBLISHED["gpt2"] + 36_096) > memory["update"]
    assert found["time"]["rate_per_rank"] is None


@pytest.mark.ci
def test_checkpoint_size_matches_estimate(trained):
    found = json.loads(inside("estimate", *SMALL, "--no-measure", "--json").stdout)
    for name, pattern in (("checkpoint_bytes", "checkpoints/*30/*.safetensors"), ("weights_file_bytes", "weights.*")):
        files = [*trained.glob(pattern)]
        assert found[name] < sum(path.stat().st_size for path in files) < found[name] + 8192 * len(files)


def test_given_rate_determines_time():
    found = estimated("gpt2", "mpi-cuda", ranks=8, rate=5e5, measured=None, steps=1000)
    took = found["time"]
    assert (took["source"], took["rate"]) == ("given", 4e6) and took["step_s"] == pytest.approx((1 << 19) / 4e6)
    assert took["total_s"] == pytest.approx(1000 * took["step_s"])
    flops = found["flops_per_token"]
    assert took["flops_per_s_and_rank"] == pytest.approx(5e5 * (flops["forward"] + flops["backward"]))
    assert "4,000,000 on 8 ranks" in render_terminal("gpt2", found)


def test_layer_time_is_the_difference_between_depths(monkeypatch):
    def seconds(work):
        work()
        layers = work.__self__.optimizer.model.config.n_layer
        update = 0.5 + 0.25 * layers
        return update if work.__name__ == "update" else update + 2 + layers

    monkeypatch.setattr(estimating, "seconds_of", seconds)
    monkeypatch.setattr(estimating, "SECONDS", 0)
    for n_layer, measured in ((2, (2,)), (3, (3,)), (20, (1, 3))):
        sizes = {"vocab_size": 9, "n_layer": n_layer, "n_embd": 8, "n_head": 1, "seq_len": 8}
        timing = measure(preset("tiny", sizes, {"recompute": "mlp"}), CpuKernels(), 4)
        assert timing["cuts"] == measured and timing["token_s"] * 4 * 8 == pytest.approx(2 + n_layer)
        assert timing["update_s"] == pytest.approx(0.5 + 0.25 * n_layer)


def test_estimate_page_has_every_part(monkeypatch):
    monkeypatch.setattr(estimating, "SECONDS", 0)
    notes = []
    asked = question("tiny", n_embd=16, n_head=2, n_layer=4, seq_len=16, batch_size=8, steps=7, measured=True)
    shown = render_terminal("tiny", estimate(asked, notes.append))
    words = ["parameters", "attention", "7 steps, 896 tokens", "gradients", "checkpoint", "tokens/s", "measured here"]
    assert all(word in shown for word in words), shown
    assert notes == ["measuring steps with 8 × 16 tokens"]
    result = inside("estimate", "--preset", "gpt2", "--stage", "mpi-cuda", "--ranks", "2", "--no-measure")
    assert result.returncode == 0 and result.stderr == ""
    assert all(word in result.stdout for word in ("124,439,808", "--gpu-memory", "--rate", "2 ranks"))


@pytest.mark.ci
def test_estimate_resolves_depth_and_time_like_train(monkeypatch, tmp_path):
    words = ["--data", "story", "--threads", "1", "--depth", "1", "--steps", "2"]
    found = inside("estimate", *words, "--no-measure", "--json")
    assert found.returncode == 0 and found.stderr.startswith("depth 1 "), found.stderr
    facts = json.loads(found.stdout)
    assert inside("train", *words, "--out", tmp_path / "run").returncode == 0
    run = RunConfig().with_values(parse_toml((tmp_path / "run" / "config.toml").read_text(), "run"))
    assert facts["parameters"]["total"] == Architecture(run.model).layout.elements
    assert (facts["batch"]["sequences"], facts["steps"]) == (run.train.batch_size, 2)

    lines = resolve_data("corpus").read_text().splitlines(keepends=True)
    (tmp_path / "long.txt").write_text("".join(lines * 20))  # enough for the time
    words = ["--data", tmp_path / "long.txt", "--tokenizer", "byte", "--threads", "1"]
    monkeypatch.setattr(estimating, "SECONDS", 0)
    found = inside("estimate", *words, "--within", "20s", "--json")
    assert "--within: this machine trains depth" in found.stderr and "\ndepth " in found.stderr
    facts = json.loads(found.stdout)
    assert facts["minutes"] == pytest.approx(20 / 60)
    assert facts["time"]["total_s"] == pytest.approx(20, abs=1 + facts["time"]["step_s"])
    page = inside("estimate", "--set", "train_minutes=3", "--rate", "5000").stdout
    assert "in 3 minutes" in page and "3.00 minutes in total" in page
    assert "length       3 minutes\n" in inside("estimate", "--set", "train_minutes=3", "--no-measure").stdout


REFUSED = (
    ("--within 1m --no-measure", ["--within", "--no-measure", "--depth"]),
    ("--within 1m --stage mpi --ranks 4", ["--within", "--ranks", "--depth"]),
    ("--within soon", ["'soon' is not a duration"]),
    ("--ranks 2", ["serial", "--ranks"]),
    ("--gpu-memory 80", ["--gpu-memory"]),
    ("--threads 0", ["--threads must be at least 1"]),
    ("--rate 5 --measure", ["--rate", "--measure"]),
    ("--tokens ten", ["--tokens must"]),
    ("--stage mpi --ranks 3", ["batch_size 16", "3 rank"]),
    ("--stage cuda --threads 2", ["--threads"]),
    ("--preset gpt3", ["gpt3"]),
)


def test_estimate_rejects_mistakes():
    for line, words in REFUSED:
        refused(inside("estimate", *line.split()), 2, *words)
    for option, value in (("--gpu-memory", "inf"), ("--rate", "nan")):
        result = inside("estimate", option, value)
        assert result.returncode == 2 and f"{value} is not a finite number" in result.stderr
    if probe().driver is None:
        args = ["--preset", "gpt2", "--stage", "cuda", "--measure"]
        refused(inside("estimate", *args), 2, "--measure", "NVIDIA")


def test_estimate_reads_text_only_for_its_vocabulary(tmp_path):
    def embedding(tokenizer):
        found = estimated("tiny", data=str(text), tokenizer=tokenizer)
        return found["parameters"]["kinds"]["embedding"] // 128

    text = tmp_path / "text"
    text.write_bytes(b"\xff")
    assert [embedding(tokenizer) for tokenizer in ("auto", "byte", "gpt2")] == [256, 256, 50257]
    with pytest.raises(DataError, match="not UTF-8"):
        embedding("char")
    text.write_text("abca")
    assert embedding("char") == 3


@pytest.mark.parametrize("fraction", ["0", "0.2"])
def test_estimate_reads_manifest_of_shards(fraction, tmp_path):
    (tmp_path / "text.txt").write_text("one two three " * 200)
    args = [tmp_path / "text.txt", "--tokenizer", "byte", "--out", tmp_path / "out", "--val-fraction", fraction]
    assert inside("data", "prepare", *args).returncode == 0
    for shard in (tmp_path / "out").glob("*.npy"):
        shard.unlink()
    change_json(tmp_path / "out" / "manifest.json", vocab_size=300)  # differs from the byte tokenizer
    found = estimated("tiny", data=str(tmp_path / "out"))
    assert found["parameters"]["kinds"]["embedding"] == 300 * 128
    assert (found["memory"]["validation"] > 0) == (fraction != "0")


def test_estimate_handles_huge_batches():
    assert divisors(3600) == [n for n in range(1, 3601) if 3600 % n == 0]
    assert estimated("tiny", batch_size=10**9)["batch"]["sequences"] == 10**9


def test_estimate_of_local_steps_counts_exchange_and_moments():
    run = preset("tiny").with_values({"outer_every": 16})
    plain, local = (estimate(Question(each, "mpi", ranks=4, rate=1e3), print) for each in (preset("tiny"), run))
    assert 3 * local["checkpoint_bytes"] == 10 * plain["checkpoint_bytes"]
    moments = [facts["memory"]["moments"] for facts in (plain, local)]
    assert 2 <= (moments[1] - moments[0]) / plain["weights_file_bytes"] < 2.2  # plus one saved tensor
    assert "weight changes every 16 steps" in render_terminal("tiny", local)
    assert "gradients per step" in render_terminal("tiny", plain)
