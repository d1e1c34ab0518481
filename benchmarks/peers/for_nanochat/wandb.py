"""An empty module in place of Weights & Biases, imported by nanochat, not used with `--run dummy`."""
