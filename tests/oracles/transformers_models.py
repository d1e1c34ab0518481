"""Compute with transformers. Run in an interpreter that has it. Each input line is a list of jobs as JSON.

make DIR SHARD {config}        a random model, saved in parts of at most SHARD
logits DIR TOKENS.npy OUT.npy  its scores, in float32
gradients DIR TOKENS.npy OUT.npz  gradients of the mean loss by parameter names
tokens DIR [strings]           IDs, decoded IDs, and the IDs that start and end text
tokens_after DIR PROMPTS COUNT greedy continuations of lists of tokens
adapt DIR OUT {settings}       a random PEFT adapter for the model
adapted DIR ADAPTER TOKENS.npy OUT.npz  its scores, and gradients of the mean loss by parameter names
"""

import json
import os
import sys

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer


def make(directory, shard, config):
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    model.to(getattr(torch, config.get("dtype", "float32"))).save_pretrained(directory, max_shard_size=shard)


def logits(directory, tokens, out):
    model, info = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    with torch.no_grad():
        np.save(out, model(torch.from_numpy(np.load(tokens))).logits.numpy())


def gradients(directory, tokens, out):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ids = torch.from_numpy(np.load(tokens))
    scores = model(ids[:, :-1]).logits.flatten(0, 1)
    torch.nn.functional.cross_entropy(scores, ids[:, 1:].flatten()).backward()
    np.savez(out, **{name: parameter.grad.numpy() for name, parameter in model.named_parameters()})


def tokens(directory, texts):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    ids = [tokenizer(text).input_ids for text in texts]
    return ids, [tokenizer.decode(text) for text in ids], [tokenizer.bos_token_id, tokenizer.eos_token_id]


def tokens_after(directory, prompts, count):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    how = {"max_new_tokens": count, "do_sample": False, "eos_token_id": -1}
    ids = [torch.tensor([prompt]) for prompt in prompts]
    new = [model.generate(each, attention_mask=torch.ones_like(each), **how) for each in ids]
    return [whole[0, len(prompt) :].tolist() for whole, prompt in zip(new, prompts, strict=True)]


def adapt(directory, out, settings):
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.3)
    model.save_pretrained(out)


def adapted(directory, adapter, tokens, out):
    from peft import PeftModel

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model = PeftModel.from_pretrained(model, adapter, is_trainable=True).eval()
    ids = torch.from_numpy(np.load(tokens))
    scores = model(ids).logits
    torch.nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    found = {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}
    np.savez(out, logits=scores.detach().numpy(), **found)


answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # libraries also print
for line in sys.stdin:
    print(json.dumps([globals()[job](*arguments) for job, *arguments in json.loads(line)]), file=answers, flush=True)
