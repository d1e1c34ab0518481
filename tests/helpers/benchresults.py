"""Results of benchmarks, made up, for the tests of what reads them."""

from itertools import product

from distgpt.measure.bench.alphabeta import AlphaBeta, Regime
from distgpt.measure.bench.scaling import Job, compared, predictions

HERE = {"date": "2026-01-02T10:00:00+00:00", "command": "distgpt bench x", "processor": "A", "cores": 2}
THERE = {**HERE, "date": "2026-03-04T10:00:00+00:00", "processor": "B", "memory_bytes": 4 << 30}


def sums(algorithms=("packed", "chunked")):
    model = AlphaBeta((Regime("scatter-gather", 1e-5, 1e-9),), 2)
    rows = []
    for size, name in product((8, 4096, 1 << 20), algorithms):
        seconds = model.seconds(2, size)
        rates = {"bytes_per_s": size / seconds, "bus_bytes_per_s": size / seconds, "repeats": 3}
        times = {"seconds": seconds, "min_seconds": seconds / 2}
        rows.append({"algorithm": name, "bytes": size, **times, **rates})
    facts = {"stage": "mpi", "ranks": 2, "nodes": 1, "ranks_per_node": 2, "cores_per_rank": 1.0}
    facts |= {"library": "MPICH <5>", "not_measured": [], "left_out": {"nccl": "none"}}
    return {"kind": "allreduce", "name": "mpi-2", "environment": HERE, **facts, "rows": rows}


def scaled():
    found = {"kind": "scaling", "name": "tiny", "environment": THERE, "preset": "tiny", "dtype": "float32"}
    found |= {"threads": 1, "cores": 2, "batch_size": 16, "seq_len": 128, "parameters": 262144}
    found |= {"gradient_bytes": 1 << 20, "allreduce": sums(["packed"])}
    job = Job(16, 128, 1 << 20, 0.001, 0.01)
    found["measured"] = [
        compared(mode, ranks, step, job, 0.161, ranks == 4)
        for mode in ("strong", "weak")
        for ranks, step in ((1, 0.161), (2, 0.1), (4, 0.2))
    ]
    found |= predictions(found, [(16, 0.161), (8, 0.081)], "packed", [8, 1024], None, 1)
    return found | {"takes_over": {"strong": None, "weak": 4096}, "off_by": 0.05}


def forwarded(sweep=None):
    row = {"preset": "S", "ranks": 1, "threads": 2, "tokens": 99, "all_seconds": [1.0], "loss": 3.3}
    row |= {"peak_memory": [1 << 20], "published_s": 0.5}
    rows = [
        {**row, "method": method, "dtype": "float32", "names": names, "measured": names, "seconds": seconds}
        | {"speedup": 8 / seconds}
        for method, seconds in (("serial", 8.0), ("batched", 1.0))
        for names in (1000, 2000)
    ]
    parts = [{**rows[0], "batched": False}, {**rows[2], "batched": True}]
    found = {"kind": "forward", "name": "S", "environment": HERE}
    return found | {"rows": rows, "sweep": sweep, "ablation": parts}


def trained():
    row = {"stage": "mpi", "ranks": 2, "mfu": 0.625, "peak_memory": [1 << 30, 1 << 30]}
    rows = [{**row, "who": "distgpt", "tokens_per_s": 5000.0}]
    rows.append({**row, "who": "torch", "tokens_per_s": 2500.0, "mfu": None, "peak_memory": None})
    peer = {"mode": "eager", "ratio": 2.0, "ratios": [1.9, 2.0, 2.1], "memory_ratio": 0.5}
    more = {"peak_gflops": 123.4, "peers": [peer]}
    return {"kind": "train", "name": "gpt-mini", "environment": HERE, "rows": rows, **more}
