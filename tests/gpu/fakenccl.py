"""A stand-in for CuPy's module of NCCL, with every call written down."""

from __future__ import annotations

from functools import partial
from typing import Any


class FakeNccl:
    """CuPy's module of NCCL; the ranks are others' business."""

    available = True
    NCCL_SUM, NCCL_UINT8, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16 = 0, 1, 7, 8, 9

    def __init__(self, identity: bytes = bytes(range(256))[64:192]) -> None:
        self.identity = identity
        self.journal: list[tuple[Any, ...]] = []
        self.NcclCommunicator = partial(NcclCommunicator, self)

    def get_unique_id(self) -> bytes:
        self.journal.append(("get_unique_id",))
        return self.identity


class NcclCommunicator:
    def __init__(self, nccl: FakeNccl, ndev: int, commId: Any, rank: int) -> None:
        if type(commId) is not bytes:
            raise TypeError("Argument 'commId' has incorrect type (expected bytes)")
        assert commId == nccl.identity
        self._nccl = nccl
        nccl.journal.append(("NcclCommunicator", ndev, rank))

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        self._nccl.journal.append(("allReduce", sendbuf, recvbuf, count, datatype, op, stream))

    def broadcast(
        self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int
    ) -> None:
        self._nccl.journal.append(("broadcast", sendbuff, recvbuff, count, datatype, root, stream))
