"""Files on disk: tensors, models, checkpoints, run directories, and the files of transformers.

Every file appears whole or not at all, and is checked before it is used.
Not here: token shards (data/), and the bare act of writing a file (files.py).
"""
