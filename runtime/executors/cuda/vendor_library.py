"""Loads NVIDIA's libraries from their wheels, a toolkit or the system."""

import ctypes

from trtc.protos.errors import EnvironmentFault


def load_vendor_library(name: str) -> ctypes.CDLL:
    """Load a library.

    Args:
        name: name of the file without its prefix and version: "cublasLt".

    Raises:
        EnvironmentFault: it is not found.
    """
    try:
        return ctypes.CDLL(_find(name))
    except (ImportError, OSError, RuntimeError) as error:
        raise EnvironmentFault(
            str(error).splitlines()[0], field=f"lib{name}", remedy="pip install 'trtc[cuda]'"
        ) from error


def _find(name: str) -> str:
    from cuda.pathfinder import load_nvidia_dynamic_lib

    return str(load_nvidia_dynamic_lib(name).abs_path)
