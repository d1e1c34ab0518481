"""Measurements: estimates, profiles, comparisons of stages, benchmarks, and PyTorch as a peer.

They start what users start, or watch it; nothing outside this folder and commands/ knows them.
Not here: how results are drawn (show/).
"""
