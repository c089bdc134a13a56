"""Generate the messages' classes next to their .proto files: `python -m trtc.protos.generate`."""

import re
from pathlib import Path

OWN = "trtc/v1"
FOREIGN = ("kserve", "smg")
"""Folders of protocols that others define."""
_IMPORT = re.compile(r"^from trtc\.protos\.\w+ import \w+ as (\w+)$", re.M)


def generate(root: Path) -> None:
    """Write `*_pb2.py` and `*_pb2.pyi` for every .proto of the protocols below `root`.

    Services have no generated code: tables of methods (runtime/wire/methods.py) list them with
    types, which the generated stubs lack.

    Ours are compiled as `trtc/v1/x.proto` (the name in descriptors and reflection); the generated
    imports are then rewritten to where the stubs live, `trtc.protos.trtc.v1`. Those of others are
    registered in a pool of descriptors of their own: a process may load their authors' stubs too,
    and protobuf refuses two files with the same names in one pool.
    """
    for proto in sorted(root.glob(f"{OWN}/*.proto")):
        _compile(proto, root)
    for stub in root.glob(f"{OWN}/*_pb2*.py*"):
        text = stub.read_text()
        stub.write_text(re.sub(r"^from trtc\.v1 ", "from trtc.protos.trtc.v1 ", text, flags=re.M))
    for folder in FOREIGN:
        for proto in sorted(root.glob(f"{folder}/*.proto")):
            _compile(proto, proto.parent)
            stub = proto.with_name(f"{proto.stem}_pb2.py")
            text = _absolute(stub.read_text(), folder)
            imported = _IMPORT.search(text)
            # A file that imports another one is in the pool of that.
            pool = (
                "_descriptor_pool.DescriptorPool()"
                if imported is None
                else f"{imported[1]}.DESCRIPTOR.pool"
            )
            stub.write_text(text.replace("_descriptor_pool.Default()", pool))
            types = stub.with_suffix(".pyi")
            types.write_text(_absolute(types.read_text(), folder))


def _absolute(text: str, folder: str) -> str:
    """Imports of neighbours, which are generated as of top-level modules."""
    return re.sub(r"^import (\w+_pb2)", rf"from trtc.protos.{folder} import \1", text, flags=re.M)


def _compile(proto: Path, root: Path) -> None:
    from grpc_tools import protoc

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


if __name__ == "__main__":
    generate(Path(__file__).resolve().parent)
