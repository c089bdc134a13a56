"""builder/passes/shard_rules.py: what it names exists, and parts fill their tensor."""

from types import SimpleNamespace
from typing import Any

import pytest

from trtc.builder.passes.shard_rules import HEAD_RULES
from trtc.plugins.registry import REGISTRY

SIZES = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 24,
    "key_heads": 2,
    "key_dim": 16,
    "value_heads": 4,
    "value_dim": 8,
    "decays": 16,
    "heads": 4,
    "groups": 2,
    "state_size": 6,
    "channels": 48,
    "width": 40,
    "in_dim": 12,
    "K": 64,
    "I": 96,
}


@pytest.mark.parametrize("op", HEAD_RULES)
def test_a_rule_names_what_the_operator_has(op: str) -> None:
    rule, definition = HEAD_RULES[op], REGISTRY[op]
    roles = {parameter.name: parameter.role for parameter in definition.inputs}
    assert next(iter(rule.reads)) == definition.inputs[0].name
    assert {roles[name] for name in rule.reads} == {"activation"}
    assert {roles[name] for name in rule.weights} <= {"weight"}
    assert {*rule.attributes, *rule.few} <= {attribute.name for attribute in definition.attributes}


@pytest.mark.parametrize("op", HEAD_RULES)
def test_the_parts_of_an_input_are_all_of_it(op: str) -> None:
    node: Any = SimpleNamespace(attrs=SIZES)
    axes = {parameter.name: parameter.axes for parameter in REGISTRY[op].inputs}
    for parameter, parts_of in HEAD_RULES[op].reads.items():
        width = int(eval(axes[parameter][1], {}, SIZES))
        parts = parts_of(node, width)
        assert sum(part.extent for part in parts) == width
        assert all(part.shares(2) == 2 for part in parts)


@pytest.mark.parametrize("op", HEAD_RULES)
def test_weights_that_a_head_has_alone_are_named(op: str) -> None:
    """A weight with an axis of heads or channels that the rule forgets would be read at those of
    rank 0 on every rank."""
    rule = HEAD_RULES[op]
    own = {*rule.attributes, *rule.few, "channels"}
    for parameter in REGISTRY[op].inputs:
        if parameter.role != "weight" or parameter.name in rule.weights:
            continue
        names = {name for axis in parameter.axes for name in axis.replace("*", "+").split("+")}
        assert not names & own, parameter.name
