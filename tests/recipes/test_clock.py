"""Runs with a time budget: train_minutes, --within and the chosen depth."""

import gzip
import json
import math
import random
import string
from dataclasses import replace

import distgpt as library
import pytest
from distgpt.callbacks.attach import TimedBudget
from distgpt.core.base.errors import UsageError
from distgpt.core.config import TrainConfig
from distgpt.core.config.presets import PRESETS, preset
from distgpt.core.data.textfile import resolve_data
from distgpt.core.data.tokenizers import load_tokenizer
from distgpt.core.model.optim import learning_rate
from distgpt.core.saved.rundir import RunDirectory
from distgpt.core.train.interfaces import Budget, is_over
from distgpt.core.train.progress import Pace, Progress
from distgpt.corpora.tokenizers.bpe import learned_size
from distgpt.parallel.choose import Chosen
from distgpt.recipes import scaling
from distgpt.recipes.depth import EASIEST, HARDEST, described, difficulty, settings_of, text_of

import conftest
from conftest import distgpt, inside, logged, refused, slow_ranks, succeeded

SMALL = ["--n-layer", "1", "--n-embd", "16", "--seq-len", "16"]
T = TrainConfig(train_minutes=1.0, warmup=0, steps=7)


def run_of(t, ranks=1, spent=0.0, seconds=4.0, queued=False, closing=0.0):
    now, progress = [100.0], Progress()
    pace = Pace(progress, Chosen(t, ranks).placement.rounds)
    clock = TimedBudget(t, pace, 100.0, spent, queued, closing, now=lambda: now[0])
    return stepped(clock, progress, now, queued, seconds), now[0] - 100.0 + spent, clock


def stepped(clock, progress, now, queued, seconds):
    found, sent = [], []
    while progress.step + len(sent) != clock.last and len(found) < 1000:
        found.append(clock.elapsed)
        now[0] += 0 if queued and not sent else seconds
        sent.append(clock.elapsed_ahead())
        while len(sent) > queued:
            progress.count_step(1.0, seconds, True)
            clock.set_elapsed(sent.pop(0), launched=progress.step + len(sent))
    return found


def test_last_step_ends_with_the_time():
    shares, seconds, clock = run_of(T)
    assert shares == sorted(shares) and shares[-2] < 1 and 52 <= seconds <= 60
    assert shares[5] == pytest.approx(6 * 4 / 59.1)  # at the end of the sixth step
    assert clock.seconds() == 60


@pytest.mark.parametrize("how, first, shortest, longest", [
    ({}, 0, 52, 60),
    ({"spent": 30.0}, 30 / 59.1, 52, 60),
    ({"queued": True}, 0, 48, 64),
    ({"closing": 3.0}, 0, 40, 48),  # leaves time after the last step
    ({"t": replace(T, outer_every=4), "ranks": 2}, 0, 52, 76),  # whole rounds
], ids=str)  # fmt: skip
def test_run_ends_with_its_time(how, first, shortest, longest):
    shares, seconds, _ = run_of(**{"t": T, **how})
    assert shares[0] == pytest.approx(first) and shares[-1] == 1 and shortest <= seconds <= longest
    assert len(shares) % (4 if "ranks" in how else 1) == 0 and run_of(T, spent=60.0)[0] == []


def test_nearly_spent_budget_is_over():
    t = replace(T, train_minutes=10.0)
    assert is_over(9, 0.985 * 600, t) and is_over(9, 600.0, t) and not is_over(9, 580.0, t)
    whole = replace(t, epochs=3.0)
    assert is_over(7, 1.0, whole) and not is_over(6, 1.0, whole) and is_over(6, 600.0, whole)
    assert run_of(t, spent=0.985 * 600)[0] == []


def test_known_last_step_ends_a_timed_run_early():
    """The learning rate follows the steps, or the clock if the machine is too slow."""
    t = replace(T, epochs=3.0)
    shares, seconds, clock = run_of(t, seconds=2.0)
    assert shares == [pytest.approx((step + 1) / 7) for step in range(7)] and seconds == 14
    assert clock.seconds() == 14
    shares, seconds, clock = run_of(replace(t, steps=70))
    assert shares[5] == pytest.approx(6 * 4 / 59.1) and seconds <= 60 and clock.seconds() == 60
    assert run_of(t, spent=50.0, seconds=0.1)[0] == [pytest.approx((step + 1) / 7) for step in range(7)]


def test_clock_without_time_counts_steps():
    clock = Budget(7)
    assert stepped(clock, Progress(), [100.0], False, 4.0) == [None] * 7 and clock.seconds() == 0


def test_rolled_back_run_ends_with_its_time():
    progress, now = Progress(), [60.0]
    clock = TimedBudget(T, Pace(progress), 0.0, now=lambda: now[0])
    progress.step = 9
    clock.set_elapsed(clock.elapsed_ahead(), launched=9)
    assert (clock.elapsed, clock.last) == (1, 10)
    progress.step = 4
    clock.set_elapsed(clock.elapsed_ahead(), launched=5)
    assert clock.last == 6


def test_schedules_follow_elapsed_share():
    t = TrainConfig(lr=1.0, min_lr=0.1, warmup=10, decay_fraction=0.5)
    falling = {0.0: 1.0, 0.5: 0.55, 1.0: 0.1}
    for schedule, expected in (
        ("linear", falling),
        ("cosine", falling),
        ("wsd", {0.0: 1.0, 0.5: 1.0, 0.75: 0.55, 1.0: 0.1}),
        ("constant", {0.0: 1.0, 1.0: 1.0}),
    ):
        chosen = replace(t, schedule=schedule)
        found = {share: learning_rate(chosen, 10, share) for share in expected}
        assert found == pytest.approx(expected), schedule
        assert learning_rate(chosen, 4, 0.9) == 0.5  # warm-up goes by steps
    assert learning_rate(replace(t, schedule="wsd", decay_fraction=0.0), 10, 1.0) == 1.0


def seconds_of(out, step):
    return json.loads((out / "checkpoints" / f"step-{step:08}" / "state.json").read_text())["seconds"]


@slow_ranks
def test_ranks_end_together_and_resume_time(tmp_path):
    out = tmp_path / "run"
    words = ["train", *SMALL, "--set", "train_minutes=0.15", "--warmup", "0", "--out", out]
    mpi = ["--stage", "mpi", "--threads", "1"]
    stopped = distgpt(*words, *mpi, "--time-limit", "6s", ranks=2)
    first = logged(out)[-1]["step"]
    assert stopped.returncode == 75, stopped.stderr
    assert 0 < seconds_of(out, first) < 6
    succeeded(*words, *mpi, "--resume", "auto", ranks=2, by=distgpt)
    steps = logged(out)
    assert steps[first]["lr"] < 1.02 * steps[first - 1]["lr"] and steps[-1]["lr"] == 0  # not a new run's rate
    assert seconds_of(out, steps[-1]["step"]) == pytest.approx(9)
    again = inside(*words, "--threads", "1", "--resume", "auto")
    assert again.returncode == 0 and "its 9s have elapsed" in again.stdout and logged(out) == steps


def test_depth_sets_defaults_and_resume_keeps_them(tmp_path):
    text = tmp_path / "my.txt"
    text.write_text("The keeper lit the lamp. The lamp was old.\n" * 9)
    toml = tmp_path / "c.toml"
    toml.write_text("lr = 0.005\nmin_lr = 0.001\n")
    words = ["train", "--data", text, "--config", toml, "--threads", "1", "--out", tmp_path / "r", "--depth"]
    result = succeeded(*words, "1", "--steps", "2", "--batch-size", "2")
    assert "depth 1" in result.stdout and "lr 0.005" in result.stdout
    run = RunDirectory(tmp_path / "r").saved()
    assert (run.model.n_embd, run.model.mlp, run.train.optimizer) == (64, "relu2", "muon")
    assert (run.train.lr, run.train.steps, run.train.batch_size, run.train.tokenizer) == (0.005, 2, 2, "byte")
    longer = succeeded(*words, "1", "--resume", "auto", "--steps", "3")
    assert "depth 1" not in longer.stdout and logged(tmp_path / "r")[-1]["step"] == 3
    refused(inside(*words, "2", "--resume", "auto"), 2, "n_layer was 1 and is now 2")


def test_depth_lines_describe_data_and_end(tmp_path):
    (text := tmp_path / "my.txt").write_text("The keeper lit the lamp. " * 40)
    for tokens, flags, words in (
        (0.0, {}, f"the text {scaling.EPOCHS}.00 times with {scaling.EPOCHS}% random input tokens"),
        (0.0, {}, f"about {2 * scaling.EPOCHS} steps of 512 tokens; lr 0.01"),
        (0.0, {"train_minutes": 2.955}, ", for at most 2:57"),
        (300.0, {"train_minutes": 2.955}, ", for 2:57"),
    ):
        given = {"data": str(text), **flags}
        assert words in described(preset("fast", {**settings_of(1, given, tokens), **given}))


def test_learned_bpe_is_saved_in_the_run(tmp_path):
    words = ["train", *conftest.SMALL, "--tokenizer", "bpe:300", "--out", tmp_path / "run", "--steps"]
    assert inside(*words, "1").returncode == 0
    assert library.load(tmp_path / "run" / "weights.safetensors").tokenizer.kind == "bpe"
    assert inside(*words, "2", "--resume", "auto").returncode == 0


def test_text_size_is_estimated_without_reading(tmp_path):
    (tmp_path / "a.txt").write_text("ab" * 5000)
    given = {"data": str(tmp_path / "a.txt")}
    assert text_of(given).tokens == 10_000 and text_of(given).tokenizer == "byte"
    assert text_of(given | {"tokenizer": "char"}).vocab_size == 2
    assert text_of(given | {"tokenizer": "gpt2"}).vocab_size == 50257
    assert text_of(given | {"vocab_size": 512}).tokenizer == "bpe:512"
    assert text_of({"data": str(tmp_path)}).tokens == 10_000


@pytest.mark.parametrize(("words", "named"), [
    ("--depth 2 --preset gpt2", "fast"),
    ("--within soon", "not a duration"),
    ("--within 1m --set train_minutes=1", "train_minutes"),
    ("--within 1m --steps 5", "--within and --steps"),
    ("--set train_minutes=1 --steps 5", "train_minutes and --steps"),
    ("--depth 2 --n-layer 3", "--depth and --n-layer"),
    ("--depth 2 --within 1m --n-layer 3", "--n-layer"),
    ("--depth 2 --seq-len 0", "seq_len"),
])  # fmt: skip
def test_invalid_depth_and_time_are_rejected(words, named, tmp_path):
    refused(inside("train", *words.split(), "--out", tmp_path / "none"), 2, named)
    with pytest.raises(UsageError, match="depth"):
        settings_of(0, {})


def within(path, seconds, out, **settings):
    notes = []
    found = library.train(within=f"{seconds}s", data=str(path), threads=1, out=out, on_note=notes.append, **settings)
    return "\n".join(notes), RunDirectory(found.directory).saved().train, found.metrics


@pytest.mark.ci
def test_within_chooses_depth_and_ends_in_time(tmp_path):
    lines = resolve_data("corpus").read_text().splitlines(keepends=True)
    (tmp_path / "long.txt").write_text("".join(lines * 8))
    notes, t, metrics = within(tmp_path / "long.txt", 8, tmp_path / "run", tokenizer="byte")
    assert t.train_minutes == pytest.approx(8 / 60) and t.optimizer == "muon"
    assert metrics[-1]["lr"] == pytest.approx(t.min_lr) and not t.eval_every
    assert "bits per byte on unseen text" in notes and "--val-fraction 0.1" in notes
    assert "the run ends after" not in notes


@pytest.mark.ci
def test_within_does_not_overfit_a_short_file(tmp_path):
    notes, t, metrics = within(resolve_data("story"), 600, tmp_path / "run", val_fraction=0.1, ensemble=1)
    assert "the run ends after about 0:" in notes and t.epochs == scaling.EPOCHS
    assert metrics[-1]["step"] == t.steps  # its passes end it, not the clock
    assert "--val-fraction" not in notes and "predicted at the end" in notes
    read = t.batch_size * RunDirectory(tmp_path / "run").saved().model.seq_len * metrics[-1]["step"]
    assert read < 30 * resolve_data("story").stat().st_size  # a busy machine measures what it gets
    # The number of steps depends on the load; the choice of evaluated steps does not.
    evaluated = [line["step"] for line in metrics if "val_loss" in line]
    last = metrics[-1]["step"]
    assert 0 < t.eval_every <= max(1, t.steps // 3)
    assert evaluated == sorted({*range(0, last + 1, t.eval_every), last})
    # A repeated command, such as a requeued job's, finds the run finished.
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}
    words = ["--data", resolve_data("story"), "--val-fraction", "0.1", "--threads", "1"]
    again = inside("train", *words, "--out", tmp_path / "run", "--within", "10m", "--resume", "auto")
    assert again.returncode == 0 and "is finished; nothing was changed" in again.stdout, again.stderr
    assert before == {path: path.read_bytes() for path in (tmp_path / "run").iterdir() if path.is_file()}


def test_evaluations_score_all_held_out_tokens_if_cheap(tmp_path):
    text = tmp_path / "my.txt"
    text.write_bytes(b"The keeper lit the lamp. " * 4000)  # 100,000 tokens
    (tmp_path / "val.txt").write_bytes(b"a" * 30_000)

    def settings(tokens, **given):
        found = settings_of(1, {"data": str(text), "tokenizer": "byte", **given}, tokens)
        return found.get("val_tokens"), found.get("eval_every"), found["steps"]

    for tokens, given, times in (
        (450e3, {"val_fraction": 0.1}, 6),
        (150e3, {"val_fraction": 0.1}, 2),  # at the start, once between and at the end
        (60e3, {"val_fraction": 0.1}, 0),
        (300e3, {"val": str(tmp_path / "val.txt")}, 1),
    ):
        scored, every, steps = settings(tokens, **given)
        assert scored == 0 and (-(-steps // every) if every else 0) == times, tokens
    scored, every, _ = settings(40e3, val_fraction=0.1)
    assert 0 < scored < 10_000 and every and settings(40e3) == (None, None, settings(40e3)[2])


@pytest.mark.ci
def test_within_limits_warmup_to_expected_steps(tmp_path):
    size = {"preset": "tiny", "n_layer": 1, "batch_size": 128, "tokenizer": "byte"}
    notes, t, metrics = within(resolve_data("story"), 1, tmp_path / "run", **size)
    assert "this machine runs about" in notes and t.warmup <= t.steps // 5 < 600 // 5
    rates = [line["lr"] for line in metrics]
    assert rates[-1] < max(rates), "the learning rate never fell"


DOCS = scaling.Text(9.7e6, 8192)


def test_scaling_laws():
    assert (scaling.matrices(4), scaling.parameters(4, 8192)) == (12 * 4 * 256**2, 12 * 4 * 256**2 + 8192 * 256)
    sizes = [scaling.vocabulary(size) for size in (70e3, 199e3, 201e3, 1e6, 30e6, 1e12)]
    assert sizes == [256, 256, 512, 2048, 8192, 32768]
    assert scaling.text_to_learn_from(70e3) == scaling.Text(70e3, 256, "byte")
    assert scaling.text_to_learn_from(30e6).tokenizer == "bpe:8192"
    assert scaling.text_to_learn_from(30e6, 4096).vocab_size == 4096
    assert scaling.tokens_to_read(3, DOCS) == 12 * scaling.parameters(3, 8192)
    assert scaling.tokens_to_read(6, DOCS) == scaling.EPOCHS * DOCS.tokens
    found = [scaling.batch(tokens) for tokens in (1e3, 2e5, 12e6, 200e6, 1e15)]
    assert found == [512, 1024, 4096, 16384, 1 << 19]
    assert [scaling.context(depth, 1e7) for depth in (1, 3, 4, 6, 7)] == [256, 256, 512, 512, 1024]
    assert scaling.context(7, 100) == 32 and scaling.context(7, 3) == 8


def test_recipe_follows_given_settings():
    run = preset("fast", scaling.recipe(4, 12e6, DOCS))
    assert (run.model.n_embd, run.model.n_head, run.model.seq_len) == (256, 4, 512)
    assert (run.train.lr, run.train.embedding_lr, run.train.head_lr) == (0.03, 0.3, 0.008)
    short = preset("fast", scaling.recipe(4, 1e6, DOCS, given={"batch_tokens": 4096}))
    assert (short.model.init_weights, run.model.init_weights) == ("bigrams", "unit")
    assert (short.train.lr, short.train.embedding_lr, short.train.head_lr) == (0.04, 0.02, 0.0007)
    assert (short.model.windows, run.model.windows) == ([0] * 4, [128, 128, 128, 0])
    assert run.train.steps * run.train.batch_size * 512 == pytest.approx(12e6, rel=0.01)
    assert scaling.recipe(4, 12e6, DOCS, given={"batch_tokens": 16384})["lr"] == 0.05
    assert scaling.recipe(4, 12e6, DOCS, given={"seq_len": 256})["batch_size"] == 16
    assert scaling.recipe(4, 12e6, DOCS, given={"steps": 50})["warmup"] == 2
    assert scaling.recipe(4, 12e6, DOCS, ranks=3)["batch_size"] == 9  # 8 cannot be shared
    for name, rates in (("fast", scaling.FAST_RATES), ("sprint", scaling.SPRINT_RATES)):  # tuned for these rates
        own = PRESETS[name]
        assert all(own[rate] == value for rate, value in rates.items() if rate in own)
        assert own["n_embd"] == scaling.REFERENCE_WIDTH and own["weight_decay"] == scaling.WEIGHT_DECAY


def test_text_that_is_read_many_times_is_regularized():
    tiny, short, long = (scaling.Text(tokens, 2048) for tokens in (2e5, 3e5, 3e6))
    for text, passes, from_pairs, noise in (
        (short, 2, True, 0),
        (short, 8, False, 0.06),
        (tiny, 8, False, 0.08),  # 8.6 parameters per token
        (short, 5, False, 0),
        (long, 1, False, 0),
    ):
        run = preset("fast", scaling.recipe(3, passes * text.tokens, text))
        train, per_step = run.train, run.train.batch_size * run.model.seq_len
        left = (1 - train.lr * train.table_decay) ** (text.tokens / per_step)  # after a pass at the peak rate
        assert left == pytest.approx(1 if from_pairs else math.exp(-scaling.DECAY_PER_PASS), rel=0.01)
        assert run.model.init_weights == ("bigrams" if from_pairs else "unit")
        assert (train.input_noise, train.epochs) == (noise, passes if passes > 2 else 0)
        assert {run.model.value_embeddings, run.model.previous_embedding} == {text is not tiny}
    assert "input_noise" not in scaling.recipe(3, 2.4e6, short, given={"pack": True})
    assert scaling.recipe(3, 1e9, long)["input_noise"] == scaling.MOST_NOISE
    shortest = scaling.recipe(1, 1e3, scaling.Text(100, 256))
    assert shortest["lr"] * shortest["table_decay"] < 1  # in one step


def test_runs_end_with_a_pass():
    text = scaling.Text(3e6, 2048)
    for possible, passes in ((2.5, 2.5), (3.7, 3), (3.9, 3.9), (4.2, 4), (99, scaling.EPOCHS)):
        found = scaling.choose(possible * 1e3, {2: 3e3}, text, only=2)
        assert found.tokens == pytest.approx(passes * 3e6) and found.seconds == pytest.approx(passes * 1e3)
    assert scaling.recipe(2, 11.7e6, text)["epochs"] == 4 and "epochs" not in scaling.recipe(2, 7.2e6, text)
    assert "epochs" not in scaling.recipe(2, 11.7e6, text, given={"steps": 9})


def test_speeds_are_interpolated():
    one = {2: 4000.0}
    assert scaling.speed(2, one, DOCS) == pytest.approx(4000)
    assert scaling.speed(4, one, DOCS) == pytest.approx(4000 * scaling.flops(2, DOCS) / scaling.flops(4, DOCS))
    two = {2: 4000.0, 6: 800.0}
    assert 800 < scaling.speed(4, two, DOCS) < 4000 and scaling.speed(8, two, DOCS) < 800 < 4000 < scaling.speed(
        1, two, DOCS
    )


def test_expected_loss_of_text_that_is_read_many_times():
    """Tinyshakespeare, BPE of 2,048: measured losses (docs/explanation/learning.md) are within 4%."""
    text = scaling.Text(346_863, 2048, difficulty=1.143)
    for depth, passes, measured in ((2, 8, 2.096), (3, 4, 2.065), (3, 6, 2.049), (3, 8, 2.039), (4, 8, 2.036)):
        assert scaling.expected_bits(depth, passes * text.tokens, text) == pytest.approx(measured, rel=0.04)


def test_expected_loss_falls_with_new_tokens():
    bits = [scaling.expected_bits(2, tokens, DOCS) for tokens in (1e6, 2e6, 9.7e6)]
    assert bits == sorted(bits, reverse=True)
    small = scaling.Text(1e6, 8192)
    assert (
        scaling.expected_bits(2, 2e6, DOCS)
        < scaling.expected_bits(2, 2e6, small)
        < scaling.expected_bits(2, 1e6, small)
    )
    assert scaling.expected_bits(2, 1e12, small) > scaling.expected_bits(2, 20e6, DOCS)


def test_more_time_never_promises_less():
    rates = {depth: 4e10 / scaling.flops(depth, DOCS) for depth in (2, 4)}
    promised = [scaling.choose(seconds, rates, DOCS).bits_per_byte for seconds in range(30, 3000, 30)]
    assert promised == sorted(promised, reverse=True) and promised[0] > promised[-1] + 0.1


def test_more_time_chooses_deeper_models():
    rates = {depth: 1e11 / scaling.flops(depth, DOCS) for depth in (2, 4)}
    chosen = [scaling.choose(60 * minutes, rates, DOCS).depth for minutes in (1, 10, 100, 1000, 1e6)]
    assert chosen == sorted(chosen) and chosen[0] < chosen[3]
    assert scaling.parameters(chosen[-1], 8192) <= scaling.PARAMETERS_PER_TOKEN * DOCS.tokens
    assert scaling.choose(1e9, {2: 1e5}, scaling.Text(100, 256)).depth == 1
    only = scaling.choose(600, rates, DOCS, only=3)
    assert only.depth == 3 and only.tokens == pytest.approx(600 * scaling.speed(3, rates, DOCS))
    short, learning_pairs = scaling.choose(200, rates, DOCS, only=3), 3 * scaling.pair_flops(3, DOCS) / 1e11
    assert 1 < learning_pairs < 60
    assert short.tokens == pytest.approx((200 - learning_pairs) * scaling.speed(3, rates, DOCS))
    assert math.isfinite(only.bits_per_byte)


def test_bpe_of_any_size_is_learned():
    assert [learned_size(name) for name in ("bpe:300", "bpe:", "bpe:-1", "bpe", "300")] == [300, 0, 0, 0, 0]
    tokenizer = load_tokenizer("bpe:300", "the keeper lit the lamp " * 20)
    assert tokenizer.size <= 300 and len(tokenizer.encode("the keeper")) < 8


WORDS = ["lamp", "keeper", "harbour", "stone", "evening", "ship", "window", "letter", "the", "and", "was"]


def prose(count, seed=0):
    draw = random.Random(seed)
    return " ".join(draw.choice(WORDS) + draw.choice("abcdefgh") for _ in range(count))


def test_compressible_text_is_easier(tmp_path):
    noise = "".join(random.Random(1).choices(string.printable, k=200_000))
    found = []
    for text in ("all work and no play " * 9000, prose(30_000), noise):
        path = tmp_path / "text.txt"
        path.write_text(text)
        found.append(difficulty(path))
    assert found == sorted(found) and found[0] == EASIEST and found[2] == HARDEST
    assert EASIEST < found[1] < HARDEST
    path.write_text("")
    assert difficulty(path) == 1.0


def test_bundled_data_is_as_difficult_as_english():
    assert 1 < difficulty(resolve_data("corpus")) < 1.2
    assert difficulty(resolve_data("corpus")) < difficulty(resolve_data("names"))


def test_difficulty_is_equal_in_all_formats(tmp_path):
    text = prose(20_000)
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    documents = [text[start : start + 5000] for start in range(0, len(text), 5000)]
    (tmp_path / "c.jsonl").write_text("".join(json.dumps({"text": each}) + "\n" for each in documents))
    shards = ["--tokenizer", "byte", "--shard-tokens", "16384", "--val-shards", "1"]
    succeeded("data", "prepare", tmp_path / "a.txt", *shards, "--out", tmp_path / "shards")
    expected = difficulty(tmp_path / "a.txt")
    for name in ("b.txt.gz", "c.jsonl", "shards"):
        assert difficulty(tmp_path / name) == pytest.approx(expected, rel=0.05), name
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, each in enumerate(documents):
        (folder / f"{number}.txt").write_text(each)
    assert difficulty(folder) == pytest.approx(expected, rel=0.2)  # files are compressed separately
