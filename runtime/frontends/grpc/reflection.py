"""grpc.reflection.v1alpha: the messages and methods of the port's services."""

from collections.abc import Mapping, Sequence
from typing import Any

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from trtc.runtime.frontends.grpc.calls import GrpcService


def reflection_service(names: Sequence[str], files: Sequence[Any]) -> GrpcService:
    """The reflection service.

    Args:
        names: names of the port's services, this one included.
        files: descriptors of the .proto files that define them.
    """
    pool = _pool((*files, health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR))
    servicer = reflection.aio.ReflectionServicer(names, pool=pool)  # type: ignore[attr-defined]
    methods: Mapping[str, grpc.RpcMethodHandler[Any, Any]] = {
        "ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(
            servicer.ServerReflectionInfo,
            request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
            response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
        )
    }
    return GrpcService(reflection_pb2.DESCRIPTOR, methods)


def _pool(files: Sequence[Any]) -> DescriptorPool:
    """One descriptor pool with all files, which come from several pools."""
    pool = DescriptorPool()
    for file in files:
        for one in (*file.dependencies, file):
            pool.AddSerializedFile(one.serialized_pb)
    return pool
