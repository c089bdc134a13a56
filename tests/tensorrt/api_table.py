"""Write the table of TensorRT's Python API that our code is held against.

    LD_LIBRARY_PATH=<stub libraries> python -m tests.tensorrt.api_table > api_11_4.json

Class -> member -> signature, as the real binding's docstrings give it ("" where they give none).
Functions and classes of the module are members of "" and those of `tensorrt.plugin` of "plugin".
"""

import inspect
import json
import sys
from typing import Any

import tensorrt as trt
import tensorrt.plugin as trtp


def table() -> dict[str, Any]:
    classes = {name: one for name, one in vars(trt).items() if inspect.isclass(one)}
    found: dict[str, dict[str, str]] = {
        name: {
            member: signature(getattr(one, member))
            for member in sorted(dir(one))
            if not member.startswith("_") or member == "__init__"
        }
        for name, one in sorted(classes.items())
        if not name.startswith("_")
    }
    found[""] = {name: "" for name in sorted(dir(trt)) if not name.startswith("_")}
    found["plugin"] = {name: "" for name in sorted(dir(trtp)) if not name.startswith("_")}
    found[""]["__version__"] = ""
    return {"version": trt.__version__, "members": found}


def signature(member: Any) -> str:
    """The first line of a docstring, if it is one."""
    lines = (inspect.getdoc(member) or "").splitlines()
    return lines[0] if lines and "(" in lines[0] and "->" in lines[0] else ""


if __name__ == "__main__":
    json.dump(table(), sys.stdout, indent=1)
    sys.stdout.write("\n")
