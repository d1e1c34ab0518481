"""Compute with llama.cpp. Run in an interpreter that has llama_cpp and gguf, with a list of jobs as JSON.

logits FILE TOKENS.npy OUT.npy  scores after every token of some sequences
tokens FILE [strings] CHAT      IDs of plain text; IDs of a chat with special tokens; the end's ID; the template
tokens_after FILE [ids] COUNT   greedy continuation
requantised FILE KIND OUT       convert the file to another mixture of types
restored KIND BLOCKS.npy OUT.npy  dequantize blocks
quantised KIND X.npy OUT.npy    quantize floats
"""

import json
import sys
from itertools import islice

import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType, quants
from llama_cpp import GGML_TYPE_F32, Llama


def opened(file, context):
    exact = {"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32}
    return Llama(file, n_ctx=context, n_threads=2, n_threads_batch=2, logits_all=True, verbose=False, **exact)


def logits(file, tokens, out):
    rows = np.load(tokens).tolist()
    model, found = opened(file, len(rows[0])), []
    for ids in rows:
        model.reset()
        model.eval(ids)
        found.append(np.array(model.scores[: len(ids)]))
    np.save(out, found)


def tokens(file, texts, chat):
    model = opened(file, 64)
    ids = [model.tokenize(text.encode(), add_bos=True, special=False) for text in texts]
    spelled = model.tokenize(chat.encode(), add_bos=False, special=True)
    return [ids, spelled, model.token_eos(), model.metadata.get("tokenizer.chat_template")]


def tokens_after(file, ids, count):
    model = opened(file, len(ids) + count)
    return list(islice(model.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0), count))


def requantised(file, kind, out):
    how = llama_cpp.llama_model_quantize_default_params()
    how.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    assert llama_cpp.llama_model_quantize(file.encode(), out.encode(), how) == 0


def restored(kind, blocks, out):
    np.save(out, quants.dequantize(np.load(blocks), GGMLQuantizationType[kind]))


def quantised(kind, x, out):
    np.save(out, quants.quantize(np.load(x), GGMLQuantizationType[kind]))


if __name__ == "__main__":
    jobs = {each.__name__: each for each in (logits, tokens, tokens_after, requantised, restored, quantised)}
    print(json.dumps([jobs[name](*more) for name, *more in json.loads(sys.argv[1])]))
