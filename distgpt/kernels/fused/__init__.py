"""The loops behind `cpu.py`, compiled by Numba: one operation family per file, one thread per call."""
