"""Compile Triton kernels (see triton.py): a line of JSON requests on stdin, a line of answers on
stdout, an empty list if Triton refuses one of them, which stderr says why.

The requests of a line are for one SM: Triton chooses some conversions by the first that it compiles
for. After sm_90 its code for sm_89 would not assemble, and the order of builds would show in their
bytes. So this process compiles nothing itself: each line has a fork of it.
"""

import importlib
import json
import os
import sys
from typing import Any

_POINTER_ALIGNMENT = 16
"""Bytes. Tensors of TensorRT and of the executors are aligned to 256."""
_STAGES = ("ttir", "ttgir", "llir", "ptx")


def compile_request(request: dict[str, Any]) -> dict[str, Any]:
    """PTX of the kernel, and the parameters of its launch.

    These are the steps of triton.compile as far as PTX. That would also look into a cache, for
    whose key it hashes the 460 MB of libtriton, and assemble PTX that still has the hidden
    parameters.
    """
    from triton import knobs
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    function = getattr(importlib.import_module(request["module"]), request["function"])
    constants = request["constants"]
    signature = request["signature"] | dict.fromkeys(constants, "constexpr")
    aligned = {
        (function.arg_names.index(name),): [["tt.divisibility", _POINTER_ALIGNMENT]]
        for name in request["aligned"]
    }
    source = ASTSource(function, signature, constants, aligned)
    target = GPUTarget("cuda", request["sm"], 32)
    backend = make_backend(target)
    options = backend.parse_options(
        {"num_warps": request["num_warps"], "num_stages": request["num_stages"]}
    )
    metadata = {"target": target, **vars(options)}
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, source.language)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    # Line information would put this machine's paths into the code.
    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True
        code = source.make_ir(
            target,
            options,
            backend.get_codegen_implementation(options),
            backend.get_module_map(),
            context,
        )
        for stage in _STAGES:
            code = stages[stage](code, metadata)
    return {
        "entry": metadata["name"],
        "num_warps": metadata["num_warps"],
        "shared_bytes": metadata["shared"],
        "scratch_bytes": metadata["global_scratch_size"] + metadata["profile_scratch_size"],
        "ptx": code,
    }


def answer_in_fork(line: str) -> str:
    """The answers to a line of requests, as JSON."""
    requests = json.loads(line)
    for request in requests:
        importlib.import_module(request["module"])  # for the forks after it, too
    answers, written = os.pipe()
    child = os.fork()
    if not child:
        os.close(answers)
        compiled = [compile_request(request) for request in requests]
        with os.fdopen(written, "w") as pipe:
            json.dump(compiled, pipe)
        os._exit(0)
    os.close(written)
    with os.fdopen(answers) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return "[]" if status else text


def main() -> None:
    # What every fork needs.
    import triton.backends.compiler
    import triton.compiler.code_generator  # noqa: F401

    for line in sys.stdin:
        sys.stdout.write(answer_in_fork(line) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
