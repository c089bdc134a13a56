"""Tensor maps (CUtensorMap), which describe matrices to TMA."""

import ctypes

from trtc.protos.launch_plan import TILE_MAP_BYTES
from trtc.runtime.device.cuda_driver import CudaDriverDevice
from trtc.runtime.executors.cuda.device import Tiles
from trtc.runtime.executors.cuda.gpu_memory import address


def tile_map(gpu: CudaDriverDevice, tiles: Tiles) -> bytes:
    """The tensor map of some tiles.

    Raises:
        EnvironmentFault: the driver refuses the map.
    """
    driver = gpu.driver
    encoded = gpu.call(
        "cuTensorMapEncodeTiled",
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
        len(tiles.sizes),
        address(tiles.place),
        [driver.cuuint64_t(size) for size in tiles.sizes],
        [driver.cuuint64_t(stride) for stride in tiles.strides],
        [driver.cuuint32_t(length) for length in tiles.box],
        [driver.cuuint32_t(1)] * len(tiles.sizes),
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    return ctypes.string_at(encoded.getPtr(), TILE_MAP_BYTES)
