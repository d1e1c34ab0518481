"""Where NVIDIA's own header of cuBLASLt is, if anywhere."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest


def _find():
    """Folders to include for the real cublasLt.h and what it includes itself, or None."""
    nvidia = find_spec("nvidia")
    wheels = [Path(place) for place in (nvidia.submodule_search_locations if nvidia else None) or ()]
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [folder for wheel in wheels for folder in sorted(wheel.glob("*/include"))]
    folders += [Path(root, "include") for root in roots if root]
    needed = ("cublasLt.h", "library_types.h")
    places = [next((f for f in folders if (f / name).is_file()), None) for name in needed]
    return None if None in places else [f"-I{place}" for place in places]


HEADER = _find()
needs_header = pytest.mark.skipif(
    HEADER is None, reason="needs cublasLt.h (nvidia-cublas) and CUDA's headers"
)
