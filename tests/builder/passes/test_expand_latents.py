"""builder/passes/expand_latents.py."""

from dataclasses import replace
from functools import partial

import msgspec

from tests.builder.passes.tiny import (
    LIMITS,
    Loose,
    Tiny,
    assert_same_function,
    assert_unchanged,
    attributes,
    before,
    nodes,
    ops,
)
from trtc.builder.passes.base import Rewrite, run_passes
from trtc.builder.passes.expand_latents import EXPAND_LATENTS, expand_latents
from trtc.plugins.latents.expansion import LEAST_NEW

FROM_FIVE = Rewrite("expand_latents", partial(expand_latents, least_new=5))


def test_prompts_are_expanded_and_compute_the_same() -> None:
    """Of the steps that are compared, those of 9 and 5 new tokens."""
    old, reader = before(EXPAND_LATENTS, Tiny(latent=True))
    new, changed = run_passes(old, [Loose(FROM_FIVE)])
    assert changed
    assert ops(new)["trtc.expanded_latent_attention"] == ops(old)["trtc.latent_attention"] == 2
    for op in ("latent_attention", "expanded_latent_attention"):
        given = attributes(nodes(new, op)[0])
        assert (given["least_new"], given["room"]) == (5, 128)
    assert_same_function(old, new, reader, 1e-5)
    assert_unchanged(FROM_FIVE, new)


def test_where_tokens_are_selected_longer_contexts_stay_absorbed() -> None:
    """Of 9 and 5 tokens, of which 7 are selected; the buffer need hold no more."""
    old, reader = before(EXPAND_LATENTS, Tiny(latent=True, top_k=7))
    new, changed = run_passes(old, [Loose(FROM_FIVE)])
    assert changed
    for op in ("latent_attention", "expanded_latent_attention"):
        given = attributes(nodes(new, op)[0])
        assert (given["least_new"], given["most_context"]) == (5, 7)
    assert_same_function(old, new, reader, 1e-5)


def test_steps_too_small_for_a_prompt_stay_absorbed() -> None:
    module, _ = before(EXPAND_LATENTS, Tiny(latent=True))
    limits = msgspec.structs.replace(LIMITS, max_num_tokens=LEAST_NEW - 1)
    assert_unchanged(EXPAND_LATENTS, replace(module, limits=limits))
