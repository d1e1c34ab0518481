"""Adapters that lanes keep beside the weights: against the merged model, rows of several in one batch."""

import numpy as np
import pytest
from test_compiled_lanes import TYPES, VARIANTS, all_threads, build, distance, plain, sequences

from distgpt.adapters.adapter import Folding
from distgpt.adapters.beside import adapters_of
from distgpt.adapters.lora import adapter_layout
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.generate.engine import Engine, complete
from distgpt.core.generate.request import Request
from distgpt.core.generate.slots import Feed
from distgpt.core.ops.kernels import Kernels
from distgpt.core.saved.modelfile import Description
from distgpt.decoding.compiled import compiled_slots

__all__ = ["all_threads"]
SOME = ({"lora_rank": 3}, {"lora_rank": 5, "lora_matrices": "q,v,down", "lora_alpha": 4.0})


def folding(config, seed, **settings):
    run = RunConfig(config, TrainConfig(**settings))
    random = np.random.default_rng(seed)
    specs = adapter_layout(run).specs
    tensors = {spec.name: random.normal(0, 0.2, spec.shape).astype(np.float32) for spec in specs}
    return Folding(Description(run, None), tensors)


def foldings(config):
    return [folding(config, seed, **settings) for seed, settings in enumerate(SOME)]


def merged(variant, merge=None):
    model = build(variant, Kernels("float64"))
    for spec in model.layout.specs if merge else ():
        merge(spec.name, model.params[spec.name])
    return model


def lanes_of(variant, kind, count, threads=2):
    model = build(variant, TYPES[kind](threads))
    return compiled_slots(model, count, adapters_of(model.config, foldings(model.config)))


# The walk with adapters is compiled for each kind. They read and add float32 beside matrices of any.
@pytest.mark.parametrize("kind", ["float32", pytest.param("int8", marks=pytest.mark.slow)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_scores_are_those_of_the_merged_model_beside_rows_of_others(variant, kind):
    texts = [text for text in sequences(variant) if len(text) > 2]
    lanes = lanes_of(variant, kind, len(texts))
    adapters = [0, 1, 2, 1][: len(texts)]
    models = [merged(variant), *(merged(variant, each) for each in foldings(lanes_config(variant)))]
    cut = [len(text) // 2 for text in texts]
    lanes.feed([Feed(i, 0, text[: cut[i]], 0, adapters[i]) for i, text in enumerate(texts)])
    rest = [Feed(i, cut[i], text[cut[i] :], 1 + i % 2, adapters[i]) for i, text in enumerate(texts)]
    found, at = lanes.feed(rest), 0
    for text, each in zip(texts, rest, strict=True):
        expected = plain(models[each.variant], text)[-each.wanted :]
        tolerance = {"float32": 6e-6, "int8": 6e-2}[kind]
        assert distance(found[at : at + each.wanted], expected) < tolerance, each
        at += each.wanted


def lanes_config(variant):
    return merged(variant).config


def test_a_sequence_gets_the_same_bits_alone_and_beside_others_on_any_number_of_threads():
    texts, found = sequences("llama"), []
    for threads in (1, 2, 3):
        lanes = lanes_of("llama", "float32", len(texts), threads)
        whole = lanes.feed([Feed(i, 0, text, len(text), i % 3) for i, text in enumerate(texts)])
        alone = [lanes.feed([Feed(0, 0, text, len(text), i % 3)]) for i, text in enumerate(texts)]
        assert (whole == np.concatenate(alone)).all()
        found.append(whole)
    assert all((each == found[0]).all() for each in found)


def test_a_lane_s_tokens_are_not_taken_over_with_another_adapter():
    prompt, told = [3, 1, 4, 1, 5, 9, 2, 6], []
    for count in (1, 3):
        engine = Engine(lanes_of("llama", "float32", count))
        requests = [Request(prompt, max_new_tokens=6, variant=i % 3, reuse=True) for i in range(6)]
        told += [[complete(engine, [each])[0][0].tokens for each in requests]]
        told += [[samples[0].tokens for samples in complete(engine, requests)]]
    assert all(each == told[0] for each in told)
    assert len({tuple(tokens) for tokens in told[0]}) == 3


def test_an_adapter_that_is_not_there_is_refused():
    lanes = lanes_of("llama", "float32", 1)
    with pytest.raises(ValueError, match="variants must lie in"):
        lanes.feed([Feed(0, 0, [1], 1, 3)])
