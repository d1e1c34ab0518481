"""Sketches against the contracts of the core: type-checked, never run (docs/explanation/seams.md)."""
