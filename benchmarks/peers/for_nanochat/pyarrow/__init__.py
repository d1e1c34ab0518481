"""What nanochat takes from pyarrow, whose wheel is too large to carry: see parquet.py."""
