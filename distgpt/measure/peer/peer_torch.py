"""PyTorch as the peer of the benchmarks: the same GPT, every fused option on; prints one JSON line.

Its fastest eager float32 run takes `--keep-freed`, its leanest `--chunked-head`. Tried on two cores and of no
help: flushing denormals, inter-op threads, binding or spinning OpenMP threads, clipping without foreach.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # PyTorch's own switch for huge pages, read once, early

import torch
from peer_gpt import GPT, Shape, fill
from timing import keep_freed_memory, peak_memory, timed
from torch import Tensor, nn


def adamw(model: nn.Module, args: argparse.Namespace) -> torch.optim.AdamW:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": args.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (args.beta1, args.beta2)
    return torch.optim.AdamW([g for g in groups if g["params"]], args.lr, betas, args.eps, fused=True)


def batches(args: argparse.Namespace, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Inputs and next-token targets, at random."""
    for _ in range(count):
        drawn = torch.randint(args.vocab_size, (args.batch_size, args.seq_len + 1))
        yield drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()


def train(args: argparse.Namespace) -> dict[str, Any]:
    shape = Shape(**{f.name: getattr(args, f.name) for f in fields(Shape)})
    if args.keep_freed:
        keep_freed_memory()
    if args.onednn:
        nn.Linear.forward = lambda layer, x: OneDnnLinear.apply(x, layer.weight, layer.bias)
    chunked = nn.LinearCrossEntropyOptions(batch_chunk_size=512, chunking_method=None)
    model = GPT(shape, chunked if args.chunked_head else None)
    parameters = list(model.parameters())
    optimizer = adamw(model, args)
    loss_of: Callable[[Tensor, Tensor], Tensor] = torch.compile(model) if args.compile else model
    total = args.warmup_steps + args.steps
    seconds, losses = [], []
    for step, (tokens, targets) in enumerate(batches(args, total)):
        began = time.perf_counter()
        if args.schedule == "linear":
            for group in optimizer.param_groups:
                group["lr"] = args.lr * (1 - step / total)
        with precision(args):
            loss = loss_of(tokens, targets)
        loss.backward()
        if args.clip:
            nn.utils.clip_grad_norm_(parameters, args.clip, foreach=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        seconds.append(time.perf_counter() - began)
    measured = seconds[args.warmup_steps :]
    median = statistics.median(measured)
    return {
        "tokens_per_s": args.batch_size * args.seq_len / median,
        "step_s_median": median,
        "step_s_min": min(measured),
        "step_s_mean": statistics.mean(measured),
        "steps": args.steps,
        "warmup_steps": args.warmup_steps,
        "first_loss": losses[0],
        "final_loss": losses[-1],
        "parameters": sum(p.numel() for p in parameters),
    }


class OneDnnLinear(torch.autograd.Function):
    """y = x wᵀ + b by the oneDNN kernels inside PyTorch, which eager float32 passes over in favour of MKL.

    MKL runs on AMD processors at about half their AVX-512 rate. The operator has no public name, so this
    is not what a PyTorch user gets: it shows how much of a difference the matrix library alone makes.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.has_bias = b is not None
        return onednn(x, w, b)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        x, w = ctx.saved_tensors
        rows = dy.flatten(0, -2)
        dw = onednn(rows.t(), x.flatten(0, -2).t(), None)
        return onednn(dy, w.t(), None), dw, rows.sum(0) if ctx.has_bias else None


def onednn(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, w, b, "none", [], "")


def precision(args: argparse.Namespace) -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16) if args.bf16_autocast else nullcontext()


def decode(args: argparse.Namespace) -> dict[str, Any]:
    """Greedy decoding with a cache by Hugging Face's GPT-2, built from a configuration, not fetched."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    from transformers import GPT2Config, GPT2LMHeadModel

    length = args.prompt_len + args.new_tokens
    config = GPT2Config(
        vocab_size=args.vocab_size,
        n_positions=max(args.seq_len, length),
        n_embd=args.n_embd,
        n_layer=args.n_layer,
        n_head=args.n_head,
        activation_function="gelu_pytorch_tanh",  # the same function as "gelu_new", in one fused kernel
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=args.tied,
        attn_implementation="sdpa",
    )
    model = GPT2LMHeadModel(config).eval()
    prompt = torch.randint(args.vocab_size, (1, args.prompt_len))
    options = {
        "do_sample": False,
        "use_cache": True,
        "min_new_tokens": args.new_tokens,
        "max_new_tokens": args.new_tokens,
        "attention_mask": torch.ones_like(prompt),
    }
    seconds = []
    with torch.inference_mode():
        model.generate(prompt, **options)  # warm-up
        for _ in range(args.repeats):
            began = time.perf_counter()
            produced = model.generate(prompt, **options)
            seconds.append(time.perf_counter() - began)
            assert produced.shape == (1, length)
    return {
        "tokens_per_s": args.new_tokens / min(seconds),
        "tokens_per_s_median": args.new_tokens / statistics.median(seconds),
        "prompt_len": args.prompt_len,
        "new_tokens": args.new_tokens,
        "repeats": args.repeats,
    }


def mean_loss(model: GPT, tokens: Any, lengths: Any, most: int, device: torch.device) -> float:
    """In batches of at most `most` names of equal length; synchronises once, at the end."""
    starts = np.cumsum(lengths) - lengths
    total = torch.zeros((), dtype=torch.float64, device=device)
    for length in np.unique(lengths):
        at = starts[lengths == length, None] + np.arange(length)
        for first in range(0, len(at), most):
            rows = torch.from_numpy(tokens[at[first : first + most]]).to(device, non_blocking=True)
            scores = model.scores(rows[:, :-1])
            total += nn.functional.cross_entropy(scores.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
    return float(total) / (len(tokens) - len(lengths))


def names(args: argparse.Namespace) -> dict[str, Any]:
    """The forward-pass study: the mean loss over names, in batches of equal length or one by one."""
    request = json.loads(args.request.read_text())
    keep_freed_memory()  # as our own passes do: the faster way for PyTorch too
    torch.set_num_threads(request["threads"])
    model = GPT(Shape(**request["shape"]), None).eval()
    fill(model, np.load(args.weights))
    model = model.to(getattr(torch, request["dtype"]))
    stored, device = np.load(args.names), torch.device("cpu")
    tokens, lengths = stored["tokens"], stored["lengths"]

    def work(count: int) -> float:
        own = lengths[:count]
        return mean_loss(model, tokens[: own.sum()], own, request["most"], device)

    with torch.inference_mode():
        found = timed(work, len(lengths), request["repeats"], request["patience"])
    return found | {"peak_memory": [peak_memory()]}


def add_model_options(parser: argparse.ArgumentParser) -> None:
    for name, default in (("n-layer", 12), ("n-head", 12), ("n-embd", 768), ("seq-len", 256)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--vocab-size", type=int, default=50257)
    parser.add_argument("--untied", dest="tied", action="store_false")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=1337)


def add_train_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--norm", choices=("layernorm", "rmsnorm"), default="layernorm")
    parser.add_argument("--no-norm-gain", dest="norm_gain", action="store_false")
    parser.add_argument("--norm-eps", type=float, default=1e-5)
    parser.add_argument("--embed-norm", action="store_true")
    parser.add_argument("--no-final-norm", dest="final_norm", action="store_false")
    parser.add_argument("--mlp", choices=("gelu", "relu", "swiglu"), default="gelu")
    parser.add_argument("--mlp-width", type=int, default=0)
    parser.add_argument("--positions", choices=("learned", "rope", "none"), default="learned")
    parser.add_argument("--no-bias", dest="bias", action="store_false")
    parser.add_argument("--vocab-multiple", type=int, default=64)
    parser.add_argument("--init-std", type=float, default=0.02)
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5, help="measured steps, after the warm-up steps")
    parser.add_argument("--warmup-steps", type=int, default=2, help="trained like the others, not measured")
    parser.add_argument("--schedule", choices=("linear", "constant"), default="constant")
    parser.add_argument("--clip", type=float, default=1.0)
    for name, value in (("lr", 3e-4), ("weight-decay", 0.1), ("beta1", 0.9), ("beta2", 0.95), ("eps", 1e-8)):
        parser.add_argument(f"--{name}", type=float, default=value)
    parser.add_argument("--bf16-autocast", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--keep-freed", action="store_true", help="faster steps for more memory")
    parser.add_argument("--chunked-head", action="store_true", help="less memory for a large vocabulary")
    parser.add_argument("--onednn", action="store_true", help="linear layers by an unofficial faster way")


def add_decode_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prompt-len", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)


def add_names_options(parser: argparse.ArgumentParser) -> None:
    for name in ("request", "weights", "names"):  # .json, .npz, .npz
        parser.add_argument(name, type=Path)


def parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for run, *adders in (
        (train, add_model_options, add_train_options),
        (decode, add_model_options, add_decode_options),
        (names, add_names_options),
    ):
        command = commands.add_parser(run.__name__)
        for add_options in adders:
            add_options(command)
        command.set_defaults(run=run)
    return parser.parse_args(words)


def main(words: list[str]) -> None:
    args = parse(words)
    if args.command != "names":
        torch.set_num_threads(args.threads)
        torch.manual_seed(args.seed)
    result = args.run(args)
    result |= {
        "command": args.command,
        "peak_rss_bytes": peak_memory(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
