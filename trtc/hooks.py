"""The contract of `trtc serve --hooks`, for code that implements it: docs/hooks.md."""

from trtc.runtime.hooks.contract import (
    LogitsEdit,
    LogitsProcessor,
    Message,
    NewOutput,
    OnOutput,
    OnPrompt,
    OnRequest,
    Parameters,
    Refused,
    Request,
    RequestInfo,
    Stop,
)

__all__ = [
    "LogitsEdit",
    "LogitsProcessor",
    "Message",
    "NewOutput",
    "OnOutput",
    "OnPrompt",
    "OnRequest",
    "Parameters",
    "Refused",
    "Request",
    "RequestInfo",
    "Stop",
]
