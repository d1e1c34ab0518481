"""The version of this package, for every file that has to name it."""

__version__ = "0.1.0"
