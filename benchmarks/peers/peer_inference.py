"""Time generation by transformers, CTranslate2 and llama.cpp, with a GPT-2 with random weights.

Runs in an environment with these packages, without distgpt: `peer_inference.py COMMAND JSON` prints JSON.
`models` creates the model in every format whose packages are installed; `measure` times one format.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

PACKAGES = {
    "transformers": ("transformers", "torch"),
    "ctranslate2": ("transformers", "torch", "ctranslate2"),
    "llama.cpp": ("transformers", "torch", "llama_cpp", "gguf"),
}
LLAMA_FILES = {"float32": "f32", "bfloat16": "bf16", "q8_0": "q8_0", "q4_0": "q4_0"}


def installed() -> list[str]:
    return [name for name, packages in PACKAGES.items() if all(find_spec(each) for each in packages)]


def make_models(job: dict[str, Any]) -> dict[str, Any]:
    """Write a GPT-2 of this shape to `folder` for transformers, and convert it to the other formats."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    folder, shape = Path(job["folder"]), job["shape"]
    sizes = {"vocab_size": shape["vocab"], "n_positions": shape["context"], "n_embd": shape["width"]}
    model = GPT2LMHeadModel(GPT2Config(**sizes, n_layer=shape["layers"], n_head=shape["heads"]))
    model.save_pretrained(folder / "transformers")
    words = [f"w{i}" for i in range(shape["vocab"] - 1)] + ["<|endoftext|>"]
    (folder / "transformers" / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "transformers" / "merges.txt").write_text("#version: 0.2\n")
    found = installed()
    if "llama.cpp" in found:
        _for_llama(model.state_dict(), shape, words, folder)
    return {"peers": found}


def _for_llama(state: dict[str, Any], shape: dict[str, int], words: list[str], folder: Path) -> None:
    import gguf
    import llama_cpp

    path = folder / "f32.gguf"
    to = gguf.GGUFWriter(path, "gpt2")
    to.add_block_count(shape["layers"])
    to.add_context_length(shape["context"])
    to.add_embedding_length(shape["width"])
    to.add_feed_forward_length(4 * shape["width"])
    to.add_head_count(shape["heads"])
    to.add_layer_norm_eps(1e-5)
    to.add_file_type(0)
    to.add_tokenizer_model("gpt2")
    to.add_tokenizer_pre("gpt-2")
    to.add_token_list(words)
    to.add_token_types([1] * len(words))
    to.add_token_merges(["w 0"])

    def add(name: str, source: str, transposed: bool = False) -> None:
        values = state[f"transformer.{source}"].float().numpy()
        to.add_tensor(name, np.ascontiguousarray(values.T) if transposed else values)

    add("token_embd.weight", "wte.weight")
    add("output.weight", "wte.weight")
    add("position_embd.weight", "wpe.weight")
    names = {"output_norm": "ln_f"}
    for i in range(shape["layers"]):
        inner = {
            "attn_norm": "ln_1", "ffn_norm": "ln_2", "attn_qkv": "attn.c_attn", "attn_output": "attn.c_proj",
            "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj",
        }  # fmt: skip
        names |= {f"blk.{i}.{name}": f"h.{i}.{source}" for name, source in inner.items()}
    for name, source in names.items():
        add(f"{name}.weight", f"{source}.weight", ".c_" in source)
        add(f"{name}.bias", f"{source}.bias")
    for step in (to.write_header_to_file, to.write_kv_data_to_file, to.write_tensors_to_file, to.close):
        step()
    for name in ("bf16", "q8_0", "q4_0"):
        how = llama_cpp.llama_model_quantize_default_params()
        how.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name.upper()}")
        if llama_cpp.llama_model_quantize(str(path).encode(), str(folder / f"{name}.gguf").encode(), how):
            raise SystemExit(f"llama.cpp cannot write {name}")


Generate = Callable[[list[list[int]], int], Any]


def of_transformers(job: dict[str, Any]) -> Generate:
    import torch
    from transformers import GPT2LMHeadModel

    torch.set_num_threads(job["threads"])
    model = GPT2LMHeadModel.from_pretrained(
        Path(job["folder"]) / "transformers", dtype=getattr(torch, job["dtype"])
    ).eval()

    @torch.inference_mode()
    def generate(prompts: list[list[int]], new: int) -> Any:
        tokens, cache = torch.tensor(prompts), None
        for _ in range(new):
            out = model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
            tokens, cache = out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values
        return tokens

    return generate


def of_ctranslate2(job: dict[str, Any]) -> Generate:
    import ctranslate2

    folder = Path(job["folder"])
    if not (folder / "ctranslate2").exists():
        converter = ctranslate2.converters.TransformersConverter(str(folder / "transformers"))
        converter.convert(str(folder / "ctranslate2"))
    generator = ctranslate2.Generator(
        str(folder / "ctranslate2"), compute_type=job["dtype"], inter_threads=1, intra_threads=job["threads"]
    )

    def generate(prompts: list[list[int]], new: int) -> Any:
        words = [[f"w{token}" for token in prompt] for prompt in prompts]
        return generator.generate_batch(
            words, max_length=new, min_length=new, sampling_topk=1, include_prompt_in_result=False,
            max_batch_size=len(prompts), end_token=[],
        )  # fmt: skip

    return generate


def of_llama(job: dict[str, Any]) -> Generate:
    import llama_cpp as l

    l.llama_log_set(_silent := l.llama_log_callback(lambda *_: None), None)
    path = Path(job["folder"]) / f"{LLAMA_FILES[job['dtype']]}.gguf"
    model = l.llama_model_load_from_file(str(path).encode(), l.llama_model_default_params())
    how = l.llama_context_default_params()
    total, count = job["prompt"] + job["new"], job["requests"]
    how.n_ctx, how.n_seq_max, how.n_batch = total * count, count, max(512, count)
    how.n_threads = how.n_threads_batch = job["threads"]
    how.kv_unified = True
    context = l.llama_init_from_model(model, how)
    vocab = l.llama_vocab_n_tokens(l.llama_model_get_vocab(model))
    batch = l.llama_batch_init(how.n_batch, 0, 1)

    def decode(entries: list[tuple[int, int, int, bool]]) -> list[int]:
        """Decode a batch of (token, position, sequence, whether scores are needed)."""
        batch.n_tokens = len(entries)
        for i, (token, place, sequence, wanted) in enumerate(entries):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, place, 1
            batch.seq_id[i][0], batch.logits[i] = sequence, wanted
        if l.llama_decode(context, batch):
            raise SystemExit("llama.cpp cannot decode")
        asked = [i for i, entry in enumerate(entries) if entry[3]]
        rows = (np.ctypeslib.as_array(l.llama_get_logits_ith(context, i), (vocab,)) for i in asked)
        return [int(row.argmax()) for row in rows]

    def generate(prompts: list[list[int]], new: int) -> Any:
        l.llama_memory_clear(l.llama_get_memory(context), True)
        last = []
        for sequence, prompt in enumerate(prompts):
            for first in range(0, len(prompt), how.n_batch):
                piece = prompt[first : first + how.n_batch]
                ends = first + len(piece) == len(prompt)
                last_at = len(piece) - 1 if ends else -1
                entries = [(t, first + i, sequence, i == last_at) for i, t in enumerate(piece)]
                found = decode(entries)
            last += found
        for i in range(new - 1):
            last = decode([(token, len(prompts[0]) + i, n, True) for n, token in enumerate(last)])
        return last, _silent

    return generate


KINDS = {"transformers": of_transformers, "ctranslate2": of_ctranslate2, "llama.cpp": of_llama}


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Return the seconds to the first and to the last new token: the best of the repeats."""
    generate = KINDS[job["peer"]](job)
    random = np.random.default_rng(1)
    prompts = random.integers(0, job["shape"]["vocab"] - 1, (job["requests"], job["prompt"])).tolist()
    generate(prompts, 2)
    first: list[float] = []
    whole: list[float] = []
    for _ in range(job["repeats"]):
        for new, seconds in ((1, first), (job["new"], whole)):
            begun = time.perf_counter()
            generate(prompts, new)
            seconds.append(time.perf_counter() - begun)
    return {"first": min(first), "whole": min(whole)}


if __name__ == "__main__":
    command, job = sys.argv[1], json.loads(sys.argv[2])
    print(json.dumps({"models": make_models, "measure": measure}[command](job)))
