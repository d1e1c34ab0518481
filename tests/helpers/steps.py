"""A step with the exchange that its settings ask for, as a run makes it."""

from distgpt.training.exchange.choose import make_exchange
from distgpt.training.step import Step


def build_step(optimizer, comm, config, say=print, **more):
    return Step(optimizer, comm, config, make_exchange(comm, optimizer, config, say), **more)
