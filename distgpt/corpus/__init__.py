"""From a text file to batches: reading, tokenizing, and the seeded order of the windows."""
