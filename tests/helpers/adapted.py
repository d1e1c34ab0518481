"""Small models with adapters, and their gradients from the gradients of whole matrices."""

import numpy as np
from distgpt.core.config import RunConfig, TrainConfig
from distgpt.core.model.model import Architecture, Model
from distgpt.core.model.passes import Pass
from distgpt.models.adapters import AdaptedModel, adapters_in


def adapted(config, kernels, matrices="all", rank=3):
    run = RunConfig(config, TrainConfig(lora_rank=rank, lora_alpha=5.0, lora_matrices=matrices))
    model, rng = AdaptedModel(run, kernels), np.random.default_rng(0)
    model.allocate_master_weights()
    for flat in (model.frozen.flat, model.weights.flat):
        kernels.put(flat, 0.2 * rng.standard_normal(flat.size))
    model.refresh()
    return model


def host(model, tensors):
    return {name: np.array(model.kernels.to_host(x), np.float64) for name, x in tensors.items()}


def merged(model):
    whole, low = host(model, model.frozen), host(model, model.params)
    for adapter in (each for each in adapters_in(model.architecture) if each.rank):
        b, a = (low[f"{adapter.name}.lora_{kind}"] for kind in "ba")
        whole[f"{adapter.linear.name}.w"][adapter.rows] += adapter.scale * b @ a
    return whole


def gradients(model, tokens, targets, recompute="mlp", n_seq=3):
    model.make_gradients()
    k = model.kernels
    work = Pass(model, n_seq, len(tokens) // n_seq, training=True, recompute=recompute)
    for accumulate in (False, True):
        work.loss_and_gradients(k.integers(tokens), k.integers(targets), 0.5, accumulate)
    return host(model, model.grads), float(k.to_host(model.grads.flags)[0])


def expected(model, kernels, tokens, targets, n_seq=3):
    """Apply the chain rule: dB = scale · dW Aᵀ, dA = scale · Bᵀ dW of the merged model."""
    plain, low, found = Model(Architecture(model.config), kernels), host(model, model.params), {}
    for name, values in merged(model).items():
        plain.params[name][...] = values
    whole, loss = gradients(plain, tokens, targets, n_seq=n_seq)
    for adapter in (each for each in adapters_in(model.architecture) if each.rank):
        dw = adapter.scale * whole[f"{adapter.linear.name}.w"][adapter.rows]
        b, a = (low[f"{adapter.name}.lora_{kind}"] for kind in "ba")
        found |= {f"{adapter.name}.lora_b": dw @ a.T, f"{adapter.name}.lora_a": b.T @ dw}
    return found, loss
