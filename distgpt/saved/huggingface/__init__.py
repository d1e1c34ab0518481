"""GPT-2 and Llama to and from the files of the transformers library.

`reading` opens their files with suspicion, `families` maps them to ours, `convert` imports and exports.
Not here: our own weights file (saved/modelfile.py).
"""
