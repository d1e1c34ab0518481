"""Base utilities: errors, atomic files, checked JSON, caches.

Not here: settings (core/config/) and computation.
"""

__version__ = "0.1.0"
