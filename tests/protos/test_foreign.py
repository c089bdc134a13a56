"""Messages that others define are theirs, field for field, and both may be in one process."""

import warnings
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor

from trtc.protos.kserve import grpc_service_pb2 as kserve
from trtc.protos.smg import trtllm_service_pb2 as smg


def fields(file: Any) -> dict[str, dict[int, tuple[Any, ...]]]:
    """Message -> number -> what the wire and the stubs make of the field."""
    found: dict[str, dict[int, tuple[Any, ...]]] = {}
    waiting = list(file.message_types_by_name.values())
    while waiting:
        message = waiting.pop()
        waiting += message.nested_types
        found[message.full_name] = {one.number: _facts(one) for one in message.fields}
    return found


def _facts(field: FieldDescriptor) -> tuple[Any, ...]:
    kind = field.message_type or field.enum_type
    oneof = field.containing_oneof.name if field.containing_oneof else ""
    return field.name, field.type, field.is_repeated, kind.full_name if kind else "", oneof


def assert_part_of(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() <= theirs.keys()
    for name, numbers in ours.items():
        assert numbers.items() <= theirs[name].items(), name


def test_kserve_messages_are_tritons() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # stubs made by an older protobuf than ours
        service = pytest.importorskip("tritonclient.grpc.service_pb2", exc_type=ImportError)
        config = pytest.importorskip("tritonclient.grpc.model_config_pb2", exc_type=ImportError)
    theirs = {**fields(service.DESCRIPTOR), **fields(config.DESCRIPTOR)}
    assert_part_of(fields(kserve.DESCRIPTOR), theirs)
    kinds = kserve.DESCRIPTOR.enum_types_by_name["DataType"].values_by_name
    known = config.DESCRIPTOR.enum_types_by_name["DataType"].values_by_name
    assert {name: one.number for name, one in kinds.items()} == {
        name: one.number for name, one in known.items()
    }


def test_smg_messages_are_its_own() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # stubs made by an older protobuf than ours
        theirs = pytest.importorskip("smg_grpc_proto.generated.trtllm_service_pb2")
    assert_part_of(fields(smg.DESCRIPTOR), fields(theirs.DESCRIPTOR))
