"""Files on disk: tensors, models, checkpoints, run directories.

Every file appears whole or not at all, and is checked before it is used.
Not here: token shards (core/data/), files of other programs (formats/), writing as such (core/base/files.py).
"""
