"""The compiled loop that makes recorded calls. Not here: what is called, which the core compiles."""
