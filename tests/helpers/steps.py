"""A step with the exchange that its settings ask for, as a run makes it."""

from distgpt.core.train.sharing import OptimizerState, exchange_for
from distgpt.core.train.step import Step
from distgpt.parallel.choose import Chosen


def state_for(model, config, comm, begins=True):
    """The optimizer with a rank's moments, before the first step."""
    strategy = Chosen(config, comm.size)
    strategy.make_gradients(comm, model, print)
    state = strategy.placement.state(model, comm.rank)
    if begins:
        state.begin()
    return state


def build_step(state, comm, config, say=print, micro_batches=None, **more):
    """`state`: that of a placement, or an optimizer alone."""
    if not isinstance(state, OptimizerState):
        state = OptimizerState(state)
    if micro_batches is None:
        strategy = Chosen(config, comm.size)
        micro_batches = strategy.micro_batches(config, comm.rank, state.optimizer.model)
    exchange = exchange_for(comm, state, config, say)
    work = Step(state.optimizer, comm, config, exchange, micro_batches=micro_batches, **more)
    work.state = state  # for tests that save and restore
    return work
