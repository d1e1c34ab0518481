"""Microkernels as functions of Python, and memory that shows what they must neither read nor write."""

import ctypes
import mmap

import llvmlite.binding as llvm
import numpy as np
from distgpt.core.cpu.matmul import assembled
from distgpt.core.cpu.matmul.microkernel import ACCUMULATE, BIAS
from distgpt.core.cpu.matmul.packing import aligned
from distgpt.core.ops.low_precision import from_bfloat16, to_bfloat16

FLOAT, BITS = "float32", "uint16"
GUARD = {FLOAT: np.float32(np.nan), BITS: np.uint16(0x7FC1)}


def wide(x):
    return np.asarray(from_bfloat16(x) if x.dtype == np.uint16 else x, np.float64)


def stored(x, kind):
    return to_bfloat16(x) if kind in (BITS, "bfloat16") else x.astype(kind)


def routine(text, name, arguments, machine=assembled.machine):
    engine = llvm.create_mcjit_compiler(assembled.verified(text), machine())
    engine.finalize_object()
    types = [ctypes.c_int64 if kind == "n" else ctypes.c_void_p for kind in arguments]
    function = ctypes.CFUNCTYPE(None, *types)(engine.get_function_address(name))

    def call(*given):
        assert engine  # keeps the code alive
        function(*(value.ctypes.data if isinstance(value, np.ndarray) else value for value in given))

    return call


def before_a_guard(values):
    size = -(-values.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    whole = np.frombuffer(mmap.mmap(-1, size + mmap.PAGESIZE), np.uint8)
    behind = ctypes.c_void_p(whole.ctypes.data + size)
    assert not ctypes.CDLL(None).mprotect(behind, ctypes.c_size_t(mmap.PAGESIZE), 0)  # PROT_NONE
    kept = whole[size - values.nbytes : size].view(values.dtype)
    kept[:] = values
    return kept


def multiply(tile, width, a, b, c, bias=None, accumulate=False, by_pairs=False):
    """c ← [c +] a b [+ bias] for a (rows, k), b (k, columns), in panels of `width` columns.

    NaN follows what must not be read, and after A the memory ends.
    """
    kind, two = a.dtype.name, 2 if a.dtype == np.uint16 else 1
    (rows, k), columns, pairs = a.shape, b.shape[1], -(-a.shape[1] // two)
    panel = aligned((pairs, width, two), kind)
    panel[...] = GUARD[kind]
    panel[:, :columns] = 0
    for i in range(k):
        panel[i // two, :columns, i % two] = b[i]
    if by_pairs:
        packed = np.full((pairs, rows + 3, two), GUARD[kind])  # an odd k is followed by something else
        for i in range(k):
            packed[i // two, :rows, i % two] = a[:, i]
        row, step, needed = 4, 4 * (rows + 3), two * ((pairs - 1) * (rows + 3) + rows) - k % two
    else:
        packed = np.full((rows, k + 3), GUARD[kind])
        packed[:, :k] = a
        row, step, needed = a.itemsize * (k + 3), 4, (rows - 1) * (k + 3) + k
    packed = before_a_guard(packed.reshape(-1)[: max(0, needed)])
    flags = BIAS * (bias is not None) | ACCUMULATE * accumulate
    added = panel if bias is None else bias
    tile(rows, k, packed, row, step, panel, c, c.strides[0], columns, added, flags)
