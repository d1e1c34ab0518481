"""What the GPU stages and these stand-ins take for granted, against the CuPy that is installed."""

import gc
import importlib
import inspect
import re
import warnings
import weakref
from importlib.util import find_spec

import fakecupy
import numpy as np
import pytest
from fakecupy import FakeNccl

from distgpt.gpu.api import address

FLOAT = np.dtype(np.float32)

USED = {
    "cuda.Device": ["device"],
    "cuda.Stream": ["null", "non_blocking"],
    "cuda.Event": ["block", "disable_timing"],
    "cuda.Device.use": fakecupy.Device.use,
    "cuda.Stream.use": fakecupy.Stream.use,
    "cuda.Stream.begin_capture": fakecupy.Stream.begin_capture,
    "cuda.Stream.end_capture": fakecupy.Stream.end_capture,
    "cuda.Stream.synchronize": fakecupy.Stream.synchronize,
    "cuda.Event.record": fakecupy.Event.record,
    "cuda.Event.synchronize": fakecupy.Event.synchronize,
    "cuda.Graph.launch": fakecupy.Graph.launch,
    "cuda.function.Module.load": fakecupy.Module.load,
    "cuda.function.Module.get_function": fakecupy.Module.get_function,
    "cuda.MemoryPointer.memset_async": fakecupy.MemoryPointer.memset_async,
    "cuda.MemoryPointer.copy_from_device_async": fakecupy.MemoryPointer.copy_from_device_async,
    "cuda.MemoryPointer.copy_from_host_async": fakecupy.MemoryPointer.copy_from_host_async,
    "cuda.MemoryPointer.copy_to_host_async": fakecupy.MemoryPointer.copy_to_host_async,
    "cuda.alloc_pinned_memory": ["size"],
    "cuda.get_elapsed_time": ["start_event", "end_event"],
    "cuda.runtime.getDeviceProperties": ["device"],
    "cuda.runtime.deviceGetPCIBusId": ["device"],
    "cuda.runtime.getDeviceCount": [],
    "cuda.runtime.memGetInfo": [],
    "cuda.nccl.get_unique_id": [],
    "cuda.nccl.NcclCommunicator.allReduce": fakecupy.NcclCommunicator.allReduce,
    "cuda.nccl.NcclCommunicator.broadcast": fakecupy.NcclCommunicator.broadcast,
    "zeros": ["shape", "dtype"],
    "get_default_memory_pool": [],
}
PROPERTIES = {
    "cuda.MemoryPointer": ["ptr"],
    "cuda.PinnedMemoryPointer": ["ptr"],
    "cuda.Event": ["done"],
    "cuda.MemoryPool": ["free_bytes", "total_bytes"],
    "cuda.function.Function": ["module"],
    "ndarray": ["data", "dtype", "shape", "size", "nbytes", "itemsize", "flags", "reshape", "copy"],
}


def real(path):
    """Something of CuPy's."""
    if find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = importlib.import_module("cupy")
        for name in path.split("."):
            found = (
                importlib.import_module("cupy.cuda.nccl") if name == "nccl" else getattr(found, name, None)
            )
            if name == "nccl" and not found.available:
                pytest.skip("CuPy does not find NCCL")
            assert found is not None, f"{path}: CuPy has no {name}"
    return found


def parameters(function):
    """The names of what a function takes; for C code from the first line of its text."""
    try:
        names = list(inspect.signature(function).parameters)
    except ValueError:
        inside = re.match(r"[\w.]+\((.*)\)", function.__doc__)[1]
        names = [part.split("=")[0].split()[-1] for part in inside.split(",") if part.strip()]
    return [name for name in names if name != "self"]


@pytest.mark.parametrize("path", USED)
def test_what_is_called_takes_these_arguments_in_this_order(path):
    here = USED[path]
    wanted = here if isinstance(here, list) else parameters(here)
    function = real(path)
    if inspect.isclass(function) and function.__init__.__doc__.startswith(f"{function.__name__}.__init__("):
        function = function.__init__
    assert parameters(function)[: len(wanted)] == wanted


@pytest.mark.parametrize("path", PROPERTIES)
def test_what_is_looked_at_is_there(path):
    found = real(path)
    assert [name for name in PROPERTIES[path] if not hasattr(found, name)] == []


def test_a_kernel_is_called_with_grid_block_arguments_shared_memory_and_stream():
    kind = real("cuda.function.Function")
    function = kind.__new__(kind)
    with pytest.raises(TypeError, match="'grid'"):
        function([1], (1,), ())
    with pytest.raises(TypeError, match="'block'"):
        function((1,), [1], ())
    with pytest.raises(TypeError, match="int"):
        function((1,), (1,), (), "shared")
    with pytest.raises(AttributeError, match="ptr"):
        function((1,), (1,), (), 0, object())


def test_ncclcommunicator_takes_a_tuple_or_bytes_and_says_so_before_it_does_anything():
    kind = real("cuda.nccl.NcclCommunicator")
    with pytest.raises(TypeError, match="commId"):
        kind(1, [0] * 128, 0)
    nccl = real("cuda.nccl")
    assert {name: int(getattr(nccl, name)) for name in dir(FakeNccl) if name.startswith("NCCL_")} == {
        name: getattr(FakeNccl, name) for name in dir(FakeNccl) if name.startswith("NCCL_")
    }


def test_a_view_of_page_locked_memory_keeps_it():
    """With memory that is page-locked by name only; the classes are CuPy's."""

    class Memory:
        numbers = np.zeros(64, np.uint8)
        ptr, size = numbers.ctypes.data, numbers.nbytes

    memory = Memory()
    alive = weakref.ref(memory)
    pointer = real("cuda.PinnedMemoryPointer")(memory, 0)
    view = np.frombuffer(pointer, FLOAT, 5)
    view[:] = 1
    assert type(pointer.ptr) is int and pointer.ptr == Memory.ptr
    assert Memory.numbers[:20].tobytes() == np.ones(5, FLOAT).tobytes()
    del memory, pointer
    gc.collect()
    assert alive() is not None
    del view
    gc.collect()
    assert alive() is None


def test_arrays_know_their_address_and_their_gaps():
    numbers = np.zeros((4, 4), FLOAT)
    memory = real("cuda.UnownedMemory")(numbers.ctypes.data, numbers.nbytes, numbers, 0)
    array = real("ndarray")((4, 4), FLOAT, memptr=real("cuda.MemoryPointer")(memory, 0))
    assert address(array) == (array.data + 0).ptr == numbers.ctypes.data
    assert address(array[1:]) == (array.data + 16).ptr == numbers.ctypes.data + 16
    assert (array.nbytes, array.itemsize, array.dtype.name) == (64, 4, "float32")
    assert array[1:].flags.c_contiguous and not array[:, 1:].flags.c_contiguous
