"""The parts of torture.py: faults, attempts, and invariants."""
