"""The loops behind `cpu.py`, compiled by Numba: a call computes its part of rows or columns on one thread."""
