"""Later turns of a chat take over what a lane holds of them; tokens that end a text."""

from dataclasses import replace

import pytest
from distgpt.core.cpu.stages import open_stage
from distgpt.core.generate.engine import Engine, complete
from distgpt.core.generate.engine_setup import slots_for
from distgpt.core.generate.request import Request
from distgpt.core.model.model import Architecture, Model
from distgpt.inference.quantized.kernels import Int8Kernels
from distgpt.models.quantized.packed import int8_of
from test_engine import LANES, LETTERS, Watched, both_lanes, model

from models import VARIANTS


def engine_of(made, dtype, kind="modern", count=1, chunk=4, **changes):
    lanes = Watched(made(model(kind, dtype, **changes), count))
    return lanes, Engine(lanes, chunk=chunk)


@both_lanes
def test_a_second_turn_computes_only_what_is_new_and_says_the_same(made, dtype):
    lanes, engine = engine_of(made, dtype, seq_len=32)
    first = Request([1, 2, 3, 4, 5, 6, 7], max_new_tokens=5, overflow="stop", reuse=True)
    said = complete(engine, [first])[0][0].tokens
    turn = [*first.prompt, *said, 8, 9, 3]
    lanes.fed.clear()
    second = Request(turn, max_new_tokens=4, overflow="stop", reuse=True)
    again = complete(engine, [second])[0][0].tokens
    assert lanes.fed[0] == (0, 11, 4)  # the answer's last token was never fed, and three are new
    anew = Request(turn, max_new_tokens=4, overflow="stop")
    lanes.fed.clear()
    assert complete(engine, [anew])[0][0].tokens == again
    assert lanes.fed[0] == (0, 0, 4)


@both_lanes
def test_another_beginning_is_taken_over_as_far_as_it_is_the_same(made, dtype):
    lanes, engine = engine_of(made, dtype, seq_len=32)
    complete(engine, [Request([1, 2, 3, 4, 5, 6, 7], max_new_tokens=3, overflow="stop")])
    for prompt, start in (([1, 2, 3, 9, 5], 3), ([1, 2, 3, 9, 5], 4), ([4, 2], 0)):
        lanes.fed.clear()
        expected = complete(engine_of(made, dtype, seq_len=32)[1], [Request(prompt, max_new_tokens=3)])
        found = complete(engine, [Request(prompt, max_new_tokens=3, reuse=True)])
        assert found[0][0].tokens == expected[0][0].tokens
        assert lanes.fed[0][1] == start


def test_each_chat_finds_its_own_lane_and_a_stranger_takes_an_empty_one():
    made, dtype = LANES["vocabulary"]
    lanes, engine = engine_of(made, dtype, count=3, seq_len=32)
    chats = [[1, 2, 3, 4, 5, 6], [7, 8, 9, 4, 5, 6]]
    for chat in chats:
        complete(engine, [Request(chat, max_new_tokens=2, overflow="stop", reuse=True)])
    used = {start for start, *_ in lanes.fed}
    assert len(used) == 2
    lanes.fed.clear()
    complete(engine, [Request([1, 9, 9], max_new_tokens=1, overflow="stop", reuse=True)])
    assert {lane for lane, *_ in lanes.fed} == {0, 1, 2} - used
    for chat in chats:
        lanes.fed.clear()
        complete(engine, [Request([*chat, 3], max_new_tokens=1, overflow="stop", reuse=True)])
        assert lanes.fed[0][1] == 6, chat


def served(lanes, engine, *prompts):
    """Where the computing of each prompt begins: the first lane and place that it is fed."""
    found = []
    for prompt in prompts:
        lanes.fed.clear()
        complete(engine, [Request(prompt, max_new_tokens=1, overflow="stop", reuse=True)])
        found.append(lanes.fed[0][:2])
    return found


def test_the_least_recently_used_lane_goes_first():
    made, dtype = LANES["compiled"]
    lanes, engine = engine_of(made, dtype, count=3, seq_len=64, vocab_size=50)
    chats = [[first, *range(2, 9 + 4 * first)] for first in range(4)]  # the shortest first
    at = dict(enumerate(served(lanes, engine, *chats[:3])))
    assert {lane for lane, _ in at.values()} == {0, 1, 2}
    assert served(lanes, engine, [*chats[0], 9]) == [(at[0][0], len(chats[0]))]
    assert served(lanes, engine, chats[3]) == [(at[1][0], 0)]
    assert served(lanes, engine, [*chats[2], 9]) == [(at[2][0], len(chats[2]))]
    assert served(lanes, engine, chats[1]) == [(at[0][0], 0)]


@both_lanes
def test_a_common_beginning_is_copied_and_its_own_lane_kept(made, dtype, monkeypatch):
    monkeypatch.setattr("distgpt.core.generate.engine.WORTHWHILE", 4)
    lanes, engine = engine_of(made, dtype, count=3, seq_len=32)
    system = [1, 2, 3, 4, 5]
    chats = [[*system, other, *range(2, 12)] for other in (6, 7)]
    (first, _), (second, begun) = served(lanes, engine, *chats)
    assert first != second and begun == len(system)
    for chat, lane in zip(chats, (first, second), strict=True):
        assert served(lanes, engine, [*chat, 3]) == [(lane, len(chat))]
    engine.submit(Request([*system, 8, 8], max_new_tokens=9, reuse=True))
    engine.step()
    engine.step()
    engine.submit(Request([*system, 8, 8, 9], max_new_tokens=1, reuse=True))
    lanes.fed.clear()
    engine.step()
    assert lanes.fed[-1][1] == len(system) + 2  # from a lane that still runs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_exact_lanes_give_the_same_bits_whatever_was_taken_over(dtype, monkeypatch):
    monkeypatch.setattr("distgpt.core.generate.engine.WORTHWHILE", 4)
    chats = [[i % 3, *range(1, 40), *range(i, 90, 3)] for i in range(6)]
    hot = {"max_new_tokens": 9, "temperature": 1.0, "logprobs": 3, "overflow": "stop"}
    kernels = open_stage("serial", 2).kernels("float32" if dtype == "int8" else dtype)
    one = Model(Architecture(replace(VARIANTS["modern"], seq_len=200, vocab_size=97)), kernels)
    one.initialise(1)
    one = int8_of(one, Int8Kernels(2)) if dtype == "int8" else one
    lanes = Watched(slots_for(one, 3))
    engine = Engine(lanes, chunk=16)
    assert lanes.is_exact
    for _ in range(2):  # the second turn goes behind the first
        anew = [complete(engine, [Request(chat, **hot)])[0][0] for chat in chats]
        taken = complete(engine, [Request(chat, **hot, reuse=True) for chat in chats])
        assert [each[0] for each in taken] == anew
        chats = [[*chat, *said.tokens, 5, 6] for chat, said in zip(chats, anew, strict=True)]
    lanes.fed.clear()
    assert complete(engine, [Request([*chats[-1], 1], **hot, reuse=True)])
    assert lanes.fed[0][1] > 60


@both_lanes
@pytest.mark.parametrize("overflow", ["shift", "slide"])
def test_what_lost_positions_is_not_taken_over(made, dtype, overflow):
    lanes, engine = engine_of(made, dtype, seq_len=8)
    complete(engine, [Request([1, 2, 3, 4, 5], max_new_tokens=9, overflow=overflow)])
    lanes.fed.clear()
    complete(engine, [Request([1, 2, 3, 4, 5, 6], max_new_tokens=1, reuse=True)])
    assert lanes.fed[0][1] == 0


def test_samples_share_a_prompt_that_was_taken_over():
    made, dtype = LANES["vocabulary"]
    _, engine = engine_of(made, dtype, count=2, seq_len=32)
    hot = {"max_new_tokens": 4, "temperature": 1.0, "n": 3, "overflow": "stop"}
    expected = complete(engine, [Request([1, 2, 3, 4, 5, 6], **hot)])[0]
    complete(engine, [Request([1, 2, 3, 4, 9], max_new_tokens=1, reuse=True)])
    found = complete(engine, [Request([1, 2, 3, 4, 5, 6], **hot, reuse=True)])[0]
    assert [each.tokens for each in found] == [each.tokens for each in expected]


@both_lanes
def test_a_token_that_ends_the_text_is_no_part_of_it(made, dtype):
    _, engine = engine_of(made, dtype, seq_len=32)
    plain = complete(engine, [Request([1, 2, 3], max_new_tokens=9)])[0][0].tokens
    end = plain[4]
    place = plain.index(end)
    engine = Engine(made(model("modern", dtype, seq_len=32), 1), LETTERS)
    sample = complete(engine, [Request([1, 2, 3], max_new_tokens=9, ends=(end,), stop=("zz",))])[0][0]
    assert sample.tokens == plain[: place + 1] and sample.reason == "stop"
    assert sample.text == LETTERS.decode(plain[:place])
