"""The ways of the forward-pass study to compute the same losses, in the order in which they are told."""

METHODS = ("python", "serial", "batched", "mpi", "cuda", "mpi-cuda", "torch", "torch-batched")
STAGE_OF = {"serial": "serial", "batched": "serial"} | {name: name for name in ("mpi", "cuda", "mpi-cuda")}
ONE_AT_A_TIME = ("python", "serial", "torch")
