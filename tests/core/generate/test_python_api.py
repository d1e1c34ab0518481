"""`model.generate` on several ranks: what one of them cannot do, all of them refuse."""

import numpy as np
import pytest
from distgpt.core.base.errors import DataError, NonFiniteError, UsageError
from distgpt.core.config import ModelConfig
from distgpt.core.cpu.kernels import CpuKernels
from distgpt.core.generate.python_api import generate
from distgpt.core.model.model import Architecture, Model
from threadranks import on_all_ranks

CONFIG = ModelConfig(vocab_size=13, seq_len=7, n_layer=1, n_head=2, n_embd=16, init_std=0.2)


def made(damaged=False):
    model = Model(Architecture(CONFIG), CpuKernels("float64", 1))
    model.initialise(3)
    if damaged:
        model.params["wte"][...] = np.nan
    return model


def on_ranks(prompt, damaged=None, stream=False, **settings):
    """What generating on three ranks returns or raises; on rank `damaged` the weights are NaN."""
    return on_all_ranks(
        3,
        lambda comm: generate(
            made(comm.rank == damaged), None, comm, prompt, stream, {"max_new_tokens": 3, **settings}
        ),
    )


def test_ranks_share_prompts_and_all_get_all_results():
    prompts = [[1, 2], [3], [4, 5, 6], [7], [8]]
    (alone,) = on_all_ranks(1, lambda comm: generate(made(), None, comm, prompts, False, {"max_new_tokens": 3}))
    assert on_ranks(prompts) == [alone] * 3


@pytest.mark.parametrize(
    "prompt, how, error, words",
    [
        ([[1], [2], [1] * 12], {"overflow": "stop"}, UsageError, "12 tokens.* 7"),
        ([[1], [2]], {"stop": "a"}, UsageError, "tokenizer"),
        ([[1], [2], [99]], {}, DataError, "less than 13"),
        ([[1], [2], [3]], {"damaged": 1}, NonFiniteError, "rank 1: the model's logits"),
        ([[1], [2]], {"damaged": 0}, NonFiniteError, "rank 0: the model's logits"),
        ([1], {"temperature": -1.0}, UsageError, "temperature"),
        ([1], {"stream": True}, UsageError, "on one rank"),
    ],
)
def test_what_one_rank_cannot_do_is_refused_by_all(prompt, how, error, words):
    for found in on_ranks(prompt, **how):
        with pytest.raises(error, match=words):
            raise found
        assert found.shared
