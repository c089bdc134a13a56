"""Generate the messages' classes next to their .proto files: `python -m trtc.protos.generate`."""

import re
from pathlib import Path


def generate(root: Path) -> None:
    """Write `*_pb2.py` and `*_pb2.pyi` for every .proto below `root`.

    Services have no generated code: runtime/wire/methods.py lists their methods with types, which
    the generated stubs lack.

    The .proto files are compiled as `trtc/v1/x.proto` (the name in descriptors and reflection);
    the generated imports are then rewritten to where the stubs live, `trtc.protos.trtc.v1`.
    """
    from grpc_tools import protoc

    for proto in sorted(root.glob("trtc/v1/*.proto")):
        status = protoc.main(
            [
                "protoc",
                f"-I{root}",
                f"--python_out={root}",
                f"--pyi_out={root}",
                str(proto.relative_to(root)),
            ]
        )
        if status != 0:
            raise SystemExit(f"protoc failed on {proto}")
    for stub in root.glob("trtc/v1/*_pb2*.py*"):
        text = stub.read_text()
        stub.write_text(re.sub(r"^from trtc\.v1 ", "from trtc.protos.trtc.v1 ", text, flags=re.M))


if __name__ == "__main__":
    generate(Path(__file__).resolve().parent)
