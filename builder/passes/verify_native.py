"""The last check before the plan: a kernel runs every node."""

from dataclasses import dataclass

from trtc.builder.module import TRTC_DOMAIN, Module
from trtc.protos.errors import InvariantError


@dataclass(frozen=True)
class VerifyNative:
    """Changes nothing; every node must be one of trtc's operators or a Split of columns.

    Raises:
        InvariantError: the first other node, by name, with the operator that was not lowered.
    """

    name: str = "verify_native"
    requires: frozenset[str] = frozenset()

    def __call__(self, module: Module) -> tuple[Module, bool]:
        for node in module.model.graph.node:
            is_view = node.op_type == "Split" and not node.domain
            if node.domain != TRTC_DOMAIN and not is_view:
                raise InvariantError(
                    f"no pass lowers this {node.op_type}: no kernel can run it", field=node.name
                )
            if node.domain == TRTC_DOMAIN and node.op_type == "kv_write":
                raise InvariantError("this KV write was not fused with a rope", field=node.name)
        return module, False


VERIFY_NATIVE = VerifyNative()
