"""The ground of all else: errors, files that appear whole, JSON that is checked, caches.

Not here: settings (core/config/), and anything that computes.
"""

__version__ = "0.1.0"
