"""Bundles: all that an installation needs, in a folder, for a machine without a network.

Not here: recipes for package managers and containers (packaging/ of the repository).
"""
