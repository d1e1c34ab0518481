"""Compilation of loops with Numba, their disk cache, and the properties of the processor."""
