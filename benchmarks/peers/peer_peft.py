"""LoRA by PEFT on a Llama of transformers with random weights: one JSON object as argument, one as answer.

It needs torch, transformers and peft. Text is random tokens; the base is in bfloat16, the adapters as asked.
"""

import json
import sys
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM


def main(asked):
    torch.manual_seed(0)
    torch.set_num_threads(asked["threads"])
    torch.set_default_dtype(torch.bfloat16)
    config = AutoConfig.for_model("llama", **asked["config"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    lora = LoraConfig(r=asked["rank"], lora_alpha=2 * asked["rank"], target_modules="all-linear")
    wide = asked["adapters"] == "float32"
    model = get_peft_model(model, lora, autocast_adapter_dtype=wide).train()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
    step = torch.compile(model) if asked["compile"] else model
    seconds = []
    for _ in range(asked["steps"]):
        tokens = torch.randint(0, config.vocab_size, (asked["batch_size"], asked["seq_len"]))
        begun = time.perf_counter()
        loss = step(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
        seconds.append(time.perf_counter() - begun)
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))
    print(json.dumps({"seconds": seconds, "peak_memory": peak, "trained": sum(p.numel() for p in trained)}))


main(json.loads(sys.argv[1]))
