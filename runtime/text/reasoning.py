"""Chat template variables that control reasoning."""

from typing import Any

from trtc.protos.errors import InvalidRequestError

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""Values of `reasoning_effort`, as in the OpenAI API. none: the model does not reason."""


def reasoning_variables(
    enabled: bool | None, effort: str | None, field: str = "reasoning_effort"
) -> dict[str, Any]:
    """Variables of a chat template.

    =======================  ==================================================
    `enable_thinking`        Qwen 3, GLM 4.5, SmolLM 3 and others
    `thinking`               DeepSeek V3.1, Granite 3.2, Kimi K2
    `reasoning_effort`       gpt-oss and others with several efforts
    =======================  ==================================================

    Args:
        enabled: None: as the effort implies, or the template's default.
        effort: one of EFFORTS; None: the template's default.
        field: the request's field of the effort, for errors.

    Raises:
        InvalidRequestError: the effort is unknown, or contradicts `enabled`.
    """
    if effort is None:
        return {} if enabled is None else _switch(enabled)
    if effort not in EFFORTS:
        raise InvalidRequestError(
            f"is {effort[:40]!r}", field=field, remedy=f"Give {', '.join(EFFORTS)}"
        )
    reasons = effort != "none"
    if enabled is not None and enabled != reasons:
        raise InvalidRequestError(
            f"is {effort!r} beside enable_thinking, which is {enabled}",
            field=field,
            remedy="Give one of them",
        )
    return {**_switch(reasons), **({"reasoning_effort": effort} if reasons else {})}


def _switch(enabled: bool) -> dict[str, Any]:
    return {"enable_thinking": enabled, "thinking": enabled}
