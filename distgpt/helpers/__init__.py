"""Processes that help to compile at a first start, when all loops of a run are missing.

Not here: how one loop is compiled, kept and waited for (core/cpu/compiling/).
"""
