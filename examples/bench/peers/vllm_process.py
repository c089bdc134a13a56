"""What runs in vLLM's own worker process: random weights, and a look at what routers choose."""

from functools import partial
from typing import Any

import torch
from torch import nn
from vllm.config import ModelConfig
from vllm.model_executor.model_loader import DummyModelLoader, register_model_loader
from vllm.v1.worker.gpu_worker import Worker

from examples.bench.peers.vllm_weights import fill_model

RANDOM = "random"
"""A load format."""
_ROUTERS = (".gate", ".router")
"""Ends of their names."""


class RandomLoader(DummyModelLoader):  # type: ignore[misc]  # vLLM is elsewhere
    """Draws weights instead of reading them."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        fill_model(model)


class RandomWeightsWorker(Worker):  # type: ignore[misc]
    """vLLM's worker, which knows the load format RANDOM."""

    def load_model(self, **options: Any) -> None:
        register_model_loader(RANDOM)(RandomLoader)
        super().load_model(**options)

    def watch_routers(self) -> None:
        """Keep what they say from now on. Only in eager mode: graphs and compiled layers call no
        hooks."""
        self._said: dict[str, torch.Tensor] = {}
        for name, module in self.get_model().named_modules():
            if name.endswith(_ROUTERS) and hasattr(module, "weight"):
                module.register_forward_hook(partial(self._keep, name))

    def distinct_experts(self) -> list[int]:
        """How many the last step's rows chose, layer by layer."""
        top_k = self.model_config.hf_text_config.num_experts_per_tok
        return [
            len(set(logits.float().topk(top_k).indices.flatten().tolist()))
            for logits in self._said.values()
        ]

    def _keep(self, name: str, module: nn.Module, given: Any, said: Any) -> None:
        self._said[name] = said[0] if isinstance(said, tuple) else said
