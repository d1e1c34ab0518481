"""The parts of torture.py: what is done to a run, how it is done, and what has to hold after it."""
