"""Steps with the gradient sync of their settings."""

import numpy as np
from distgpt.core.components import components
from distgpt.core.config import ModelConfig, TrainConfig
from distgpt.core.cpu.kernels import Bfloat16Kernels, CpuKernels
from distgpt.core.data.batches import ArrayTokens, Batches
from distgpt.core.model.model import Architecture, Model
from distgpt.core.train.parallel_strategy import OptimizerState
from distgpt.core.train.step import Step
from distgpt.parallel.choose import Chosen

MODEL = ModelConfig(vocab_size=64, seq_len=8, n_layer=2, n_head=2, n_embd=32)
CONFIG = TrainConfig(batch_size=24, grad_accum=2, steps=10, seed=3, recompute="mlp", matmul="own", clip=0.5)


def state_for(model, config, comm, begins=True):
    strategy = Chosen(config, comm.size)
    strategy.make_gradients(comm, model, print)
    state = strategy.placement.state(model, comm.rank)
    if begins:
        state.begin()
    return state


def build_step(state, comm, config, say=print, micro_batches=None, **more):
    if not isinstance(state, OptimizerState):
        state = OptimizerState(state)
    if micro_batches is None:
        strategy = Chosen(config, comm.size)
        micro_batches = strategy.micro_batches(config, comm.rank, state.optimizer.model)
    exchange = components().gradient_sync(comm, state, config, say)
    work = Step(state.optimizer, comm, config, exchange, micro_batches=micro_batches, **more)
    work.state = state  # tests save and restore it
    return work


def batches_of(config=CONFIG, kind=MODEL):
    tokens = ArrayTokens(np.arange(700, dtype=np.uint16) * 7 % kind.vocab_size)
    return Batches(tokens, kind.seq_len, config.batch_size, config.seed)


def model_of(config=CONFIG, ranks=1, kind=MODEL, threads=1):
    is_narrow, how = config.dtype == "bfloat16", (config.dtype, threads, config.matmul_backend)
    model = Model(Architecture(kind), Bfloat16Kernels(threads) if is_narrow else CpuKernels(*how))
    model.allocate_master_weights(ranks)
    model.initialise(1)
    return model


def steps_of(comm, config=CONFIG, kind=MODEL, threads=1, **more):
    return build_step(state_for(model_of(config, comm.size, kind, threads), config, comm), comm, config, **more)


def trained(comm, config=CONFIG, steps=5, work=None, **how):
    work = work or steps_of(comm, config, **how)
    batches, seen, read = batches_of(config, how.get("kind", MODEL)), [], []
    for step in range(steps):
        read.append(work.launch(step, batches).wait()[:2])
        seen.append(work.model.weights.flat.copy())
    return work, seen, read
