"""Read row groups of documents for nanochat, from files written by benchmarks/gpu_carry.py.

Under a Parquet shard's name such a file has, compressed by xz, a JSON list for each row group.
"""

import json
import lzma


class Texts:
    def __init__(self, texts):
        self._texts = texts
        self.num_rows = len(texts)

    def column(self, name):
        assert name == "text"
        return self

    def to_pylist(self):
        return self._texts


class ParquetFile:
    def __init__(self, path):
        with lzma.open(path, "rt", encoding="utf-8") as file:
            self._groups = [json.loads(line) for line in file]
        self.num_row_groups = len(self._groups)

    def read_row_group(self, number, columns=None):
        return Texts(self._groups[number])
