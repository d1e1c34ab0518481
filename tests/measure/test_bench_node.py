"""bench node: one real run of small models, and what is made of its rows."""

import json
from types import SimpleNamespace

import pytest
from conftest import needs_mpi
from threadranks import on_all_ranks

from distgpt.core.base.errors import DisagreementError, UsageError
from distgpt.core.cpu.stages import open_stage
from distgpt.measure.bench import node, node_jobs
from distgpt.measure.bench.node_page import (
    RECORDED_LOSS,
    RECORDED_WEIGHTS,
    TOLERANCE,
    chart,
    figures,
    judged,
    page,
    scaled,
)

SIZE = {"n_layer": 1, "n_head": 2, "n_embd": 16, "seq_len": 16, "grad_accum": 1}


@pytest.fixture(scope="module")
def bits():
    """Rows of the fixed run, by one thread and by two."""
    found = [node_jobs.bits(open_stage("serial", threads), 0.0) for threads in (1, 2)]
    return [{"ranks": 1, "threads": i + 1, "hosts": 1, **row} for i, row in enumerate(found)]


def test_the_fixed_run_has_the_recorded_loss_and_the_same_bits_on_two_threads(bits):
    verdict = judged(bits)
    assert verdict["right"] and verdict["apart"] <= TOLERANCE, verdict
    assert verdict["verdict"].startswith("the same bits on 1 × 1, 1 × 2 (ranks × threads); loss 2.968")
    assert len(set(bits[0]["losses"])) == 20 and judged([]) is None


def test_other_bits_and_another_loss_are_found(bits):
    other = bits[1] | {"weights": "0" * 64}
    verdict = judged([bits[0], other])
    assert not verdict["right"] and "losses or weights on 1 × 2" in verdict["verdict"]
    for by, right in ((0.5 * TOLERANCE, True), (2 * TOLERANCE, False)):
        row = bits[0] | {"losses": [RECORDED_LOSS * (1 + by)], "weights": "0" * 64}
        assert judged([row])["right"] is right
    assert "the recorded bits" in judged([bits[0] | {"weights": RECORDED_WEIGHTS}])["verdict"]


@pytest.fixture
def clocked(tmp_path, monkeypatch):
    """A node of one minute whose clock goes on when parts say so, and what its parts were given."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(node, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(node, "FOR_THE_PAGE", 0.0)
    given = {}

    def part(name, weight, least, takes):
        def run(seconds):
            given[name] = seconds
            clock.now += takes(seconds)

        return node.Part(name, "", weight, lambda: least, run)

    whole = node.Node(node.NodeOptions(out=tmp_path, minutes=1), None, "no mpirun")
    return SimpleNamespace(whole=whole, part=part, given=given, clock=clock)


def test_a_job_that_fails_does_not_take_the_others_with_it(capsys):
    wanted = [
        {"kind": "train", "name": "tiny", "dtype": "float32", "settings": {"n_head": 3}},
        {"kind": "bits"},
    ]
    request = {"stage": "serial", "threads": 1, "begun": 0.0, "until": 0.0, "jobs": wanted}
    node_jobs.measure(json.dumps(request))
    _, failed, right = map(json.loads, capsys.readouterr().out.splitlines())
    assert "n_head" in failed["failed"] and right["kind"] == "bits" and right["weights"]


def found_of(training=(), sums=()):
    """A result with these rows, of two threads."""
    own = {"node": {"threads": 2}, "dtype": "bfloat16", "model": "gpt2", "peaks": [], "disk": None}
    return {
        **own,
        "generation": [],
        "training": [*training],
        "exchange": [{"ranks": 2, "rows": [*sums]}][: len(sums)],
    }


def trained(ranks, threads, hosts=1, **more):
    own = {"preset": "gpt2", "dtype": "bfloat16", "tokens_per_s": 1.0}
    return {**own, "ranks": ranks, "threads": threads, "hosts": hosts, **more}


def test_hosts_of_a_hostfile_have_figures_and_lines_of_their_own():
    """One host of the file has as many ranks and threads as this node has without it."""
    rows = [trained(1, 1), trained(1, 2), trained(2, 1), trained(1, 2, of_hostfile=1)]
    rows += [trained(2, 1, of_hostfile=1), trained(2, 2, hosts=2, of_hostfile=2)]
    found = found_of(rows)
    names = [
        f"train_gpt2_bfloat16{end}" for end in ("_1x1", "", "_2x1", "_1_host", "_2x1_1_host", "_2x2_2_hosts")
    ]
    assert [*figures(found)] == names
    drawn = {series.name: len(series.x) for series in chart(scaled(found)).series}
    assert drawn == {"one process": 2, "ranks": 1, "hosts of the hostfile": 3, "one core times as many": 2}
    assert chart(rows[1:3]) is None, "nothing is to be seen of one number of cores"


def test_sums_are_those_of_the_largest_array_that_was_summed_in_all_ways():
    way = lambda name, size, rate: {"algorithm": name, "bytes": size, "bytes_per_s": rate, "seconds": 1.0}  # noqa: E731
    rows = [way("allreduce", 8, 1e9), way("shared memory", 8, 5e9), way("allreduce", 64, 2e9)]
    assert figures(found_of(sums=rows))["sum_2_ranks"]["value"] == 5.0


def test_joules_are_those_of_all_hosts_or_not_known():
    for known, joules in (((1.5, 2.0), 3.5), ((1.5, None), None)):

        def rank(comm, known=known):
            reads = comm.local_rank == 0
            own = known[comm.rank // 2] if reads else None
            return node_jobs._of_all_hosts(SimpleNamespace(comm=comm), own, reads)

        assert on_all_ranks(4, rank, per_node=2) == [joules] * 4


def test_time_is_divided_among_what_is_left_and_the_rest_is_named(clocked, monkeypatch):
    part = clocked.part
    plan = [
        part("whole share", 2, 1, lambda seconds: seconds),
        part("done early", 1, 1, lambda seconds: 2.0),
        part("takes more", 1, 1, lambda seconds: 2 * seconds),
        part("too long", 1, 30, lambda seconds: seconds),
        part("short", 1, 1, lambda seconds: seconds),
    ]
    monkeypatch.setattr(clocked.whole, "_plan", lambda: iter(plan))
    clocked.whole.measure()
    assert clocked.given == pytest.approx(
        {"whole share": 20, "done early": 10, "takes more": 38 / 3, "short": 38 / 3}
    )
    assert clocked.whole.left_out == [{"part": "too long", "what": "", "why": node.NO_TIME}]
    assert clocked.whole.seconds() <= 66


def test_a_part_that_fails_is_named_with_its_reason(clocked, monkeypatch):
    def fail(seconds):
        raise UsageError("no MPI")

    monkeypatch.setattr(
        clocked.whole, "_plan", lambda: iter([node.Part("sums", "of 2", 1, lambda: 0.0, fail)])
    )
    clocked.whole.measure()
    assert clocked.whole.left_out == [{"part": "sums", "what": "of 2", "why": "no MPI"}]


def test_processes_that_take_too_long_are_ended_and_keep_what_they_have(clocked, monkeypatch):
    row = json.dumps(
        {"kind": "peak", "ranks": 1, "threads": 2, "hosts": 1, "dtype": "float32", "gflops": 9.0}
    )
    failed = '{"kind": "train", "failed": "too large"}'
    told = f'{{"starting_s": 3.0}}\n{row}\n{failed}\n'
    ended = SimpleNamespace(code=124, output=told, complaint=lambda: "")
    asked = []
    monkeypatch.setattr(node.time, "time", lambda: 0.0, raising=False)
    monkeypatch.setattr(node.jobs, "start", lambda *how: asked.append(how) or ended)
    wanted = [{"kind": "peak", "dtype": "float32"}, {"kind": "train", "name": "tiny"}, {"kind": "bits"}]
    clocked.whole._place(1, 2, wanted, 10.0)
    ((words, launcher, ranks, timeout),) = asked
    assert (
        (launcher, ranks) == (None, 1) and 10 < timeout <= 21 and words[:3] == ["bench", "node", "--measure"]
    )
    assert [left["why"] for left in clocked.whole.left_out] == ["too large", node.NO_TIME]
    assert clocked.whole.left_out[1]["what"] == "bits, 1 rank of 2 threads"
    assert [row["gflops"] for row in clocked.whole._rows] == [9.0] and clocked.whole._starting == 4.0
    clocked.clock.now = 55.0
    clocked.whole._place(1, 2, [{"kind": "bits"}], 10.0)
    assert asked[-1][-1] == 5.0  # never beyond the end


@needs_mpi
@pytest.mark.slow
def test_a_node_is_measured_and_has_a_page(tmp_path, capsys):
    options = node.NodeOptions(
        out=tmp_path,
        minutes=3,
        presets=("tiny",),
        settings={**SIZE, "batch_size": 4},
        checkpoint=3 << 20,
        generator="tiny",
        largest_sum="64K",
    )
    node.bench(options)
    found = json.loads((tmp_path / "node.json").read_text())
    assert found["kind"] == "node" and found["environment"]["cores"] >= found["node"]["cores"] > 0
    assert found["bits"]["right"] and len(found["bits"]["places"]) >= 1 + (found["node"]["threads"] > 1)
    assert {row["dtype"] for row in found["training"]} == {"float32", "bfloat16"}
    places = {(row["ranks"], row["threads"]) for row in found["training"]}
    if found["node"]["threads"] == 2:
        assert places == {(1, 2), (1, 1), (2, 1)}
    assert found["exchange"][0]["ranks"] == 2 and found["exchange"][0]["rows"]
    assert found["disk"]["bytes"] == 3 << 20 and found["disk"]["read_bytes_per_s"] > 0
    assert [row["requests"] for row in found["generation"]] == [1, 32]
    assert not found["left_out"] and found["seconds"] < 198
    names = {"peak_float32", "memory", "sum_2_ranks", "checkpoint_write", "generate_32", "train_tiny_float32"}
    assert names <= found["figures"].keys() and found["figures"] == figures(found)
    text = (tmp_path / "node.html").read_text()
    assert text == page(found) and "<svg" in text and "http-equiv" in text and "src=" not in text
    assert "Not measured" not in text and "tokens/s" in capsys.readouterr().out
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["node.html", "node.json"]


def test_wrong_bits_are_a_failure_with_the_page_written(tmp_path, monkeypatch, bits):
    def measured(whole):
        whole._rows += [{"kind": "bits", **bits[0]}, {"kind": "bits", **bits[1], "weights": "other"}]

    monkeypatch.setattr(node.Node, "measure", measured)
    with pytest.raises(DisagreementError, match="bits are wrong here: losses or weights on 1 × 2"):
        node.bench(node.NodeOptions(out=tmp_path, minutes=1))
    assert "Failed" in (tmp_path / "node.html").read_text()


def test_bits_that_were_not_compared_are_no_success(tmp_path, monkeypatch):
    def measured(whole):
        row = {"part": "training", "what": "bits, 1 rank of 2 threads", "why": "no memory was left"}
        whole.left_out.append(row)

    monkeypatch.setattr(node.Node, "measure", measured)
    with pytest.raises(DisagreementError, match="bits were not compared: no memory was left"):
        node.bench(node.NodeOptions(out=tmp_path, minutes=1))
    assert "bits were not compared" in (tmp_path / "node.html").read_text()
