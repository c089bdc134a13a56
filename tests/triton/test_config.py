"""config.pbtxt, read by protobuf with Triton's own message."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.manifests import tiny_manifest
from tests.support.triton_client import grpcclient
from trtc.protos.manifest import TargetFacts
from trtc.runtime.frontends.triton.config import config_text
from trtc.runtime.frontends.triton.engines import EngineSet, PackagedEngine
from trtc.runtime.frontends.triton.settings import read_settings
from trtc.runtime.tensors.table import INPUTS, OUTPUTS


def engine(directory: str, **fields: Any) -> PackagedEngine:
    return PackagedEngine(Path(directory), tiny_manifest(**fields), directory)


def gpu_engine(sm: int) -> PackagedEngine:
    target = TargetFacts(kind="cuda", name=f"cuda:sm_{sm}", archs=(f"sm_{sm}",), toolchain="")
    return engine(f"sm_{sm}", target=target)


def parse(name: str, *engines: PackagedEngine) -> Any:
    from google.protobuf import text_format

    message = grpcclient.model_config_pb2.ModelConfig()
    return text_format.Parse(config_text(name, EngineSet(engines)), message)


def test_every_tensor_is_there_with_its_type_and_shape() -> None:
    config = parse("tiny", engine("engine"))
    types = grpcclient.model_config_pb2.DataType
    for found, expected in ((config.input, INPUTS), (config.output, OUTPUTS)):
        assert [(one.name, types.Name(one.data_type), tuple(one.dims)) for one in found] == [
            (one.name, one.data_type, one.dims) for one in expected
        ]
    assert all(one.optional for one in config.input)


def test_a_cpu_engine_is_one_decoupled_instance() -> None:
    config = parse("tiny", engine("engine"))
    assert (config.name, config.backend) == ("tiny", "python")
    assert config.max_batch_size == tiny_manifest().limits.max_batch_size
    assert config.model_transaction_policy.decoupled
    (group,) = config.instance_group
    assert (group.count, group.kind) == (1, group.KIND_CPU)
    assert not config.cc_model_filenames
    assert config.parameters["engine"].string_value == "engine"
    settings = {key: value.string_value for key, value in config.parameters.items()}
    del settings["engine"]
    read_settings(settings)


def test_gpu_engines_are_mapped_and_run_on_the_first_gpu() -> None:
    config = parse("tiny", gpu_engine(80), gpu_engine(120))
    (group,) = config.instance_group
    assert (group.count, group.kind, list(group.gpus)) == (1, group.KIND_GPU, [0])
    assert dict(config.cc_model_filenames) == {"8.0": "sm_80", "12.0": "sm_120"}
    assert "engine" not in config.parameters


@pytest.mark.parametrize("name", ["a.b-c_9", "tensorrt_llm_bls"])
def test_the_name_is_the_models(name: str) -> None:
    assert parse(name, engine("engine")).name == name
