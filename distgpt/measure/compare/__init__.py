"""The same job through every stage: what each took, and whether all computed the same thing."""
