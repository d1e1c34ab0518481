"""Where a training step's time goes: each operation measured, and held against what the machine can do."""
