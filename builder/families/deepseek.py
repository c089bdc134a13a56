"""DeepSeek-V3 whose layers are all dense: latent attention and a gated MLP."""

from trtc.builder.families import common
from trtc.builder.families.config import Config
from trtc.builder.families.latent import latent_attention, latent_rope
from trtc.builder.spec import DecoderSpec, LayerSpec


def deepseek_v3(config: Config, max_seq_len: int) -> DecoderSpec:
    """DeepseekV3ForCausalLM."""
    layers = config.integer("num_hidden_layers")
    config.require("first_k_dense_replace", (layers,), layers)
    rope = latent_rope(config, max_seq_len)
    act, width = common.activation(config), config.integer("intermediate_size")

    def layer(_index: int, prefix: str) -> LayerSpec:
        mixer = latent_attention(config, prefix, rope)
        mlp = common.gated_mlp(config, f"{prefix}.mlp", width, act)
        return common.layer_spec(config, prefix, mixer, mlp)

    return common.decoder(config, "deepseek_v3", layer)
