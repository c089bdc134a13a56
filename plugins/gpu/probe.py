"""Compute capability of a GPU from the CUDA driver, without torch and without a context."""

import ctypes

_MAJOR, _MINOR = 75, 76
"""CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*."""


def device_sm(ordinal: int = 0) -> int | None:
    """Compute capability of a visible GPU as the driver says it: 90; None without driver or GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), ordinal):
        return None
    driver.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
    driver.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    return 10 * major.value + minor.value
