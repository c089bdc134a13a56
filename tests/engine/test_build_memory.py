"""How much memory a build takes: weights are streamed, models are never in memory together."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.big import write_big_checkpoint

TOKENIZER = Path(__file__).parents[2] / "examples" / "models" / "pyllama"
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 512,
    "num_experts": 16,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "vocab_size": 8192,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
"""Most weights are of experts, of which a token takes one: they are many for what they compute."""
_BUILD = """
import sys
from pathlib import Path
from trtc.builder.pipeline import build
from trtc.builder.request import BuildRequest
from trtc.runtime.engine.probe import Probe
request = BuildRequest(
    model=sys.argv[1],
    output=Path(sys.argv[2]),
    dtype="bf16",
    max_seq_len=1024,
    max_num_tokens=256,
    eval_tokens=512,
)

def told(step=""):
    status = Path("/proc/self/status").read_text().split()
    print(int(status[status.index("VmHWM:") + 1]) * 1024, step)

build(request, probe=Probe(), progress=told)
told("the end")
"""
MADE = "running the unquantised model on held-out text: 0/"
"""The first step of a measurement, said before it begins: the engine is made."""


@pytest.mark.slow
def test_a_bf16_build_takes_little_more_than_its_weights(tmp_path: Path) -> None:
    """Peaks of resident bytes of a process of its own, file pages that it maps included."""
    weights = write_big_checkpoint(tmp_path / "model", CONFIG, TOKENIZER)
    assert weights > 300e6
    command = [sys.executable, "-c", _BUILD, str(tmp_path / "model"), str(tmp_path / "engine")]
    level = {"TRTC_TESTS_CXX_LEVEL": "-O1"}  # it runs for longer than it is compiled
    environment = os.environ | level
    said = subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment
    ).stdout
    made = next(int(line.split()[0]) for line in said.splitlines() if MADE in line)
    measured = int(said.splitlines()[-1].split()[0])
    # Tensor by tensor: nowhere near all of them at once.
    assert made < 0.5 * weights + 0.2e9, f"{made / 1e9:.2f} GB for {weights / 1e9:.2f} GB"
    assert measured < 1.3 * weights + 0.7e9, f"{measured / 1e9:.2f} GB for {weights / 1e9:.2f} GB"
