"""Ranks of a job as threads with emulated GPUs. Emulated NCCL compares their calls."""

import traceback
from dataclasses import replace
from functools import cache

import numpy as np
from distgpt.core.config import ModelConfig, TrainConfig
from distgpt.core.cpu.kernels import Bfloat16Kernels, CpuKernels
from distgpt.core.data.batches import ArrayTokens, Batches
from distgpt.core.model.model import Architecture, Model
from distgpt.gpu.kernels import CudaKernels
from distgpt.gpu.matmul import LtMatmul
from distgpt.gpu.transport import DeviceComm, HostStaged, Nccl
from distgpt.parallel.choose import Chosen
from fakenccl import FakeNccl, Job
from hostgpu import HostDevice, host_lt
from steps import build_step, state_for
from threadranks import on_all_ranks

MODEL = ModelConfig(vocab_size=32, seq_len=4, n_layer=2, n_head=2, n_embd=32)
CONFIG = TrainConfig(batch_size=24, grad_accum=2, seed=3, recompute="mlp", clip=0.5)
SHARDED = replace(CONFIG, grad_sync="sharded")


def on_gpus(size, act, way="nccl", hasty=False, graphs=True):
    """Return the result or the error of act(comm, device) on each rank."""
    job = Job(size)

    def run(host):
        device = HostDevice(graphs=graphs)
        device.xp.hasty = hasty
        nccl = FakeNccl(job=job, xp=device.xp)
        transport = Nccl(host, device, nccl) if way == "nccl" else HostStaged(host, device)
        try:
            return act(DeviceComm(host, transport), device)
        except Exception as error:
            if not getattr(error, "shared", False):  # other ranks would wait
                traceback.print_exc()
                job.fail(f"rank {host.rank} has ended: {error!r}")
                host.meeting.abort()
            return error

    return on_all_ranks(size, run, patience=60)  # kernels may have to be compiled


def work_of(comm, device, config, say=print):
    """Return a step of the small model on this rank; without a device, on the CPU."""
    if device:
        kernels = CudaKernels(device, LtMatmul(host_lt(device.xp), device), config.dtype)
    else:
        kernels = Bfloat16Kernels() if config.dtype == "bfloat16" else CpuKernels(config.dtype)
    model = Model(Architecture(MODEL), kernels)
    model.allocate_master_weights(comm.size, Chosen(config, comm.size).placement.own(model.layout, comm.rank))
    model.initialise(1)
    return build_step(state_for(model, config, comm), comm, config, say)


def batches():
    tokens = ArrayTokens(np.arange(700, dtype=np.uint16) * 7 % MODEL.vocab_size)
    return Batches(tokens, MODEL.seq_len, CONFIG.batch_size, CONFIG.seed)


@cache
def packed(dtype="float32", way="nccl", steps=3):
    """Train on two ranks that sum in one call; cached for comparisons."""
    config = replace(CONFIG, dtype=dtype)
    return on_gpus(2, lambda comm, device: trained(comm, device, config, steps), way)


def trained(comm, device, config=CONFIG, steps=3):
    """Return a rank's weights after some steps, and the loss and norm of each step."""
    return steps_of(work_of(comm, device, config), range(steps))


def steps_of(work, steps):
    model = work.model
    read = [work.launch(step, batches()).wait()[:2] for step in steps]
    params = model.kernels.to_host(model.params.flat)
    if hasattr(model.kernels, "device"):
        model.kernels.device.xp.check()
    return params.copy(), read
