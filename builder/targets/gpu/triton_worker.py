"""Compile Triton kernels for one SM (see triton.py): JSON requests on stdin, answers on stdout."""

import importlib
import json
import sys
import tempfile
from typing import Any

_POINTER_ALIGNMENT = 16
"""Bytes. Tensors of TensorRT and of the executors are aligned to 256."""


def compile_request(request: dict[str, Any]) -> dict[str, Any]:
    """PTX of the kernel, and what its launch needs."""
    import triton
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(importlib.import_module(request["module"]), request["function"])
    constants = request["constants"]
    signature = request["signature"] | dict.fromkeys(constants, "constexpr")
    aligned = {
        (function.arg_names.index(name),): [["tt.divisibility", _POINTER_ALIGNMENT]]
        for name in request["aligned"]
    }
    # Line information would put this machine's paths into the code.
    with tempfile.TemporaryDirectory() as cache, knobs.cache.scope(), knobs.compilation.scope():
        knobs.cache.dir = cache
        knobs.compilation.disable_line_info = True
        compiled = triton.compile(
            ASTSource(function, signature, constants, aligned),
            target=GPUTarget("cuda", request["sm"], 32),
            options={"num_warps": request["num_warps"], "num_stages": request["num_stages"]},
        )
    metadata = compiled.metadata
    return {
        "entry": metadata.name,
        "num_warps": metadata.num_warps,
        "shared_bytes": metadata.shared,
        "scratch_bytes": metadata.global_scratch_size + metadata.profile_scratch_size,
        "ptx": compiled.asm["ptx"],
    }


if __name__ == "__main__":
    json.dump([compile_request(request) for request in json.load(sys.stdin)], sys.stdout)
