"""The part of pyarrow that nanochat needs, since pyarrow's wheel is too large; see parquet.py."""
