"""The methods of trtllm.TrtllmService that are served, with their types."""

from functools import partial

from trtc.protos.smg import common_pb2 as common
from trtc.protos.smg import trtllm_service_pb2 as pb
from trtc.runtime.wire.methods import Method

SERVICE = "trtllm.TrtllmService"
_method = partial(Method, service=SERVICE)

GENERATE = _method("Generate", pb.GenerateRequest, pb.GenerateResponse)
"""Streams its responses."""
HEALTH_CHECK = _method("HealthCheck", pb.HealthCheckRequest, pb.HealthCheckResponse)
ABORT = _method("Abort", pb.AbortRequest, pb.AbortResponse)
GET_MODEL_INFO = _method("GetModelInfo", pb.GetModelInfoRequest, pb.GetModelInfoResponse)
GET_SERVER_INFO = _method("GetServerInfo", pb.GetServerInfoRequest, pb.GetServerInfoResponse)
SUBSCRIBE_KV_EVENTS = _method(
    "SubscribeKvEvents", common.SubscribeKvEventsRequest, common.KvEventBatch
)
"""Streams its responses."""
