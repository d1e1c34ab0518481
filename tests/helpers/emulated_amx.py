"""AMX without a processor that has it: functions that stand in for the instructions, and look for misuse.

As Intel's manual describes them (Instruction Set Extensions reference, chapter 3). Every thread has tile
registers of its own. What the processor would refuse is collected in `faults`.
"""

import ctypes
import threading
from dataclasses import replace
from functools import partial

import llvmlite.binding as llvm
import numpy as np

from distgpt.kernels.matmul import amx, processor
from distgpt.kernels.matmul.vectors import AMX

PREFIX = "distgpt_emulated_"
# Rounded as this processor can: LLVM rounds to bfloat16 by itself only for those with the instruction.
SHAPE = replace(AMX, dot="avx512bf16" in processor.features())
TYPES = {"ptr": ctypes.c_void_p, "i8": ctypes.c_uint8, "i64": ctypes.c_int64}

faults = []


class Registers(threading.local):
    def __init__(self):
        self.release()

    def release(self):
        self.rows = self.widths = None  # of each register, in rows and bytes
        self.data = np.zeros((8, 16, 64), np.uint8)

    def __getitem__(self, number):
        """Return the configured part of a register."""
        assert self.rows is not None and self.rows[number] and self.widths[number], f"tmm{number} has no size"
        return self.data[number, : self.rows[number], : self.widths[number]]


_registers = Registers()


def memory(address, size):
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def ldtilecfg(address):
    config = memory(address, 64)
    _registers.release()
    widths, rows = config[16:32].view(np.uint16), config[48:56]
    assert config[0] == 1 and not config[1:16].any() and not config[32:48].any() and not config[56:].any()
    assert (rows <= 16).all() and (widths <= 64).all() and ((rows == 0) == (widths == 0)).all()
    _registers.rows, _registers.widths = rows.copy(), widths.copy()


def tilezero(number):
    _registers[number][...] = 0


def tileloadd64(number, address, stride):
    to = _registers[number]
    for r in range(len(to)):
        to[r] = memory(address + r * stride, to.shape[1])


def tilestored64(number, address, stride):
    of = _registers[number]
    for r in range(len(of)):
        memory(address + r * stride, of.shape[1])[:] = of[r]


def tdpbf16ps(c, a, b):
    assert len({c, a, b}) == 3
    sums, left, right = (_registers[number].view(kind) for number, kind in ((c, "f4"), (a, "u2"), (b, "u2")))
    rows, columns, pairs = len(left), sums.shape[1], len(right)
    assert sums.shape == (rows, columns) and left.shape[1] == 2 * pairs and right.shape[1] == 2 * columns
    x = flushed((left.astype(np.uint32) << 16).view(np.float32)).reshape(rows, pairs, 1, 2)
    y = flushed((right.astype(np.uint32) << 16).view(np.float32)).reshape(pairs, columns, 2)
    with np.errstate(invalid="ignore", over="ignore"):
        total = np.zeros((rows, columns, 2), np.float32)
        for pair in range(pairs):  # products of bfloat16 are exact in float32
            total = flushed(total + x[:, pair] * y[pair])
        sums[...] = flushed(flushed(sums) + flushed(total[..., 0] + total[..., 1]))


def flushed(x):
    """Without denormals."""
    return np.where(np.abs(x) < np.finfo(np.float32).tiny, np.copysign(np.float32(0), x), x)


def tilerelease():
    _registers.release()


def _watched(instruction):
    def run(*arguments):
        try:
            instruction(*arguments)
        except Exception as error:
            faults.append(f"{instruction.__name__}{arguments}: {error!r}")

    return run


_callbacks = {}
for _name, _types in amx.INTRINSICS.items():
    _kinds = [TYPES[each] for each in _types.split(", ") if each]
    _callbacks[_name] = ctypes.CFUNCTYPE(None, *_kinds)(_watched(globals()[_name]))
    llvm.add_symbol(PREFIX + _name, ctypes.cast(_callbacks[_name], ctypes.c_void_p).value)


def install():
    """Let this process compute in bfloat16 with the emulation; before anything else imports the kernels."""
    processor.shape = lambda: SHAPE
    amx.module = partial(amx.module, prefix=PREFIX)
