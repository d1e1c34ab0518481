"""Models as llama.cpp computes them: run in an interpreter that has llama_cpp, with a list of jobs as JSON.

logits FILE TOKENS.npy OUT.npy  scores behind every token of one sequence
tokens FILE [texts]             their ids, with tokens spelled in the text kept as text, and what ids decode to
tokens_after FILE IDS COUNT     what it writes on, greedily
"""

import json
import sys

import numpy as np
from llama_cpp import Llama


def opened(file, context=0):
    return Llama(file, n_ctx=context, n_batch=4096, n_ubatch=512, n_threads=2, logits_all=True, verbose=False)


def logits(file, tokens, out):
    ids = np.load(tokens).tolist()
    model = opened(file, len(ids))
    model.eval(ids)
    np.save(out, np.array(model.scores[: len(ids)]))


def tokens(file, texts):
    model = opened(file, 64)
    ids = [model.tokenize(text.encode(), add_bos=True, special=False) for text in texts]
    return {"ids": ids, "eos": model.token_eos(), "template": model.metadata.get("tokenizer.chat_template")}


def tokens_after(file, ids, count):
    model = opened(file, len(ids) + count)
    found = []
    for token in model.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
        found.append(token)
        if len(found) == count:
            return found


if __name__ == "__main__":
    jobs = {each.__name__: each for each in (logits, tokens, tokens_after)}
    print(json.dumps([jobs[name](*more) for name, *more in json.loads(sys.argv[1])]))
