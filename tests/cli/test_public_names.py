"""What `import trtc` offers, exactly."""

import subprocess
import sys

import pytest

import trtc

PUBLIC = {
    "AsyncClient",
    "Client",
    "Output",
    "Result",
    "TrtcError",
    "__version__",
    "build",
    "errors",
    "open_engine",
}


def test_the_public_names_are_these() -> None:
    assert set(trtc.__all__) == PUBLIC
    assert set(dir(trtc)) == PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(trtc, name) is not None


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'bulid'"):
        trtc.bulid  # noqa: B018


def test_importing_trtc_imports_nothing_heavy() -> None:
    code = (
        "import sys, trtc\n"
        "heavy = {'grpc', 'numpy', 'torch', 'onnx', 'click', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_runtime_face_needs_no_builder_package() -> None:
    code = (
        "import sys, trtc\n"
        "trtc.Client, trtc.AsyncClient, trtc.open_engine\n"
        "heavy = {'torch', 'onnx', 'transformers', 'modelopt'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
