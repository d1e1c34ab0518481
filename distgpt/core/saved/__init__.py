"""Files on disk: tensors, models, checkpoints, run directories.

All files are written atomically and checked before use.

Not here: token shards (core/data/), third-party formats (formats/), and basic file access
(core/base/files.py).
"""
