"""The parts of the GPU benchmark; `benchmarks/gpu.py` runs them."""
