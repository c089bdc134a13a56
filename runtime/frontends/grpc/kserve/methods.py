"""The methods of inference.GRPCInferenceService, with their types."""

from functools import partial

from trtc.protos.kserve import grpc_service_pb2 as pb
from trtc.runtime.wire.methods import Method

SERVICE = "inference.GRPCInferenceService"
_method = partial(Method, service=SERVICE)

SERVER_LIVE = _method("ServerLive", pb.ServerLiveRequest, pb.ServerLiveResponse)
SERVER_READY = _method("ServerReady", pb.ServerReadyRequest, pb.ServerReadyResponse)
SERVER_METADATA = _method("ServerMetadata", pb.ServerMetadataRequest, pb.ServerMetadataResponse)
MODEL_READY = _method("ModelReady", pb.ModelReadyRequest, pb.ModelReadyResponse)
MODEL_METADATA = _method("ModelMetadata", pb.ModelMetadataRequest, pb.ModelMetadataResponse)
MODEL_CONFIG = _method("ModelConfig", pb.ModelConfigRequest, pb.ModelConfigResponse)
MODEL_STATISTICS = _method("ModelStatistics", pb.ModelStatisticsRequest, pb.ModelStatisticsResponse)
MODEL_INFER = _method("ModelInfer", pb.ModelInferRequest, pb.ModelInferResponse)
MODEL_STREAM_INFER = _method("ModelStreamInfer", pb.ModelInferRequest, pb.ModelStreamInferResponse)
"""Requests are streamed as well."""
REPOSITORY_INDEX = _method("RepositoryIndex", pb.RepositoryIndexRequest, pb.RepositoryIndexResponse)
REPOSITORY_LOAD = _method(
    "RepositoryModelLoad", pb.RepositoryModelLoadRequest, pb.RepositoryModelLoadResponse
)
REPOSITORY_UNLOAD = _method(
    "RepositoryModelUnload", pb.RepositoryModelUnloadRequest, pb.RepositoryModelUnloadResponse
)
