"""An empty module in place of Weights & Biases, which nanochat imports and with `--run dummy` does not use."""
