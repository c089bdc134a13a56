"""What operators' code is written against, exactly."""

import dataclasses
import inspect
import subprocess
import sys

import trtc.hooks
from trtc.runtime.hooks import contract

FIELDS = {
    "RequestInfo": ["request_id", "model", "tenant"],
    "Message": ["role", "content"],
    "Parameters": [
        *("sampling", "max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos"),
        *("priority", "cache_salt", "edits_logits"),
    ],
    "Request": ["info", "parameters", "text", "token_ids", "messages", "n"],
    "LogitsEdit": ["allowed", "bias"],
    "NewOutput": ["index", "text", "token_ids", "finish_reason"],
    "Stop": ["text"],
}
METHODS = {
    "OnRequest": ("on_request", ["self", "request"]),
    "OnPrompt": ("on_prompt", ["self", "request", "token_ids"]),
    "LogitsProcessor": ("logits_processor", ["self", "request", "output_ids"]),
    "OnOutput": ("on_output", ["self", "request", "output"]),
}


def test_the_names_are_these() -> None:
    assert sorted(trtc.hooks.__all__) == sorted({*FIELDS, *METHODS, "Refused"})


def test_what_hooks_are_given_and_give_has_these_fields() -> None:
    found = {
        name: [one.name for one in dataclasses.fields(getattr(trtc.hooks, name))] for name in FIELDS
    }
    assert found == FIELDS


def test_the_methods_take_these_arguments() -> None:
    for name, (method, arguments) in METHODS.items():
        function = getattr(getattr(trtc.hooks, name), method)
        assert list(inspect.signature(function).parameters) == arguments
    assert tuple(method for method, _ in METHODS.values()) == contract.METHODS


def test_a_process_that_calls_hooks_imports_little() -> None:
    code = (
        "import sys, trtc.hooks, trtc.runtime.hooks.child\n"
        "heavy = {'numpy', 'grpc', 'click', 'asyncio', 'tokenizers'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
