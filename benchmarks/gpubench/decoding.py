"""Greedy decoding of GPT-2 124M from a cache, with and without CUDA graphs, against Hugging Face's."""

from __future__ import annotations

import statistics
import time

import numpy as np

from distgpt.comm.serial import SerialComm
from distgpt.measure.jobs import for_torch
from distgpt.model.generate import Sampling, generate
from distgpt.model.model import Model
from gpubench.machine import Machine
from gpubench.section import Section
from gpubench.training import gpt2


def decode(section: Section) -> None:
    shape = gpt2(section)
    prompt, new = (3, 4) if section.quick else (256, 256)
    repeats = 1 if section.quick else 3
    for dtype in ("bfloat16", "float32"):
        task = {"do": "decode", "shape": for_torch(shape), "dtype": dtype, "prompt": prompt, "new": new}
        answers = section.start_peers({"Hugging Face": task | {"repeats": min(2, repeats)}}, timeout=60)
        for who, answer in answers.items():
            section.report.row(f"{dtype}/{who}", **answer)
    section.close()
    tokens = np.random.default_rng(2).integers(0, shape.vocab_size, prompt).tolist()
    for graphs in (True, False):
        with section.report.attempt("graphs" if graphs else "no graphs"):
            machine = section.machine if graphs else Machine(section.host, section.report.note, graphs=False)
            for dtype in ("bfloat16", "float32"):
                who = f"{dtype}/ours{'' if graphs else ', no graphs'}"
                with section.report.attempt(who):
                    model = Model(shape, machine.kernels(dtype))
                    model.initialise(1)
                    seconds = []
                    for _ in range(repeats + 1):
                        began = time.perf_counter()
                        found = list(generate(model, tokens, new, Sampling(), SerialComm()))
                        seconds.append(time.perf_counter() - began)
                        assert len(found) == new
                    best = statistics.median(seconds[1:])
                    section.report.row(who, tokens_per_s=new / best, seconds=seconds[1:])
