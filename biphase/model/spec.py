"""What a decoder-only model is, as plain data: the waist between model families and the code that runs them.

A family (one small file in `families/`) turns a checkpoint's config into a `ModelSpec` and its tensor names into the
canonical ones below. Executors (eager torch over `biphase.ops`, the native CPU program, CUDA graphs) interpret the
spec and know no family. Stdlib only.

Canonical weight names, shapes as torch.nn.Linear has them, `[out_features, in_features]`; norms are float32, all
others in the model's dtype:
    embed                       [vocab_size, hidden_size]
    final_norm                  [hidden_size]
    lm_head                     [vocab_size, hidden_size]; absent when tied
    layers.{i}.attn_norm        [hidden_size]
    layers.{i}.q / .k / .v      [num_heads * head_dim or num_kv_heads * head_dim, hidden_size]
    layers.{i}.q_bias / .k_bias / .v_bias / .o_bias        where the spec says so
    layers.{i}.q_norm / .k_norm [head_dim]                 where qk_norm
    layers.{i}.o                [hidden_size, num_heads * head_dim]
    layers.{i}.post_attn_norm   [hidden_size]              where post_norms
    layers.{i}.mlp_norm         [hidden_size]
    layers.{i}.gate / .up       [intermediate_size, hidden_size]
    layers.{i}.down             [hidden_size, intermediate_size]
    layers.{i}.post_mlp_norm    [hidden_size]              where post_norms
    layers.{i}.router           [num_experts, hidden_size] where moe
    layers.{i}.experts.{e}.gate / .up / .down              where moe
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding, half-split (NeoX) pairing. `scaling` is one of "none", "linear", "llama3", "yarn", "factors".

    `params` are the scaling's numbers as the checkpoint names them, sorted by name. What they mean is said in
    `kernels.reference.rotary_frequencies`.
    """

    theta: float
    rotary_dim: int
    scaling: str = "none"
    params: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class MoESpec:
    num_experts: int
    num_experts_per_token: int
    expert_intermediate_size: int
    # Renormalise the chosen experts' weights to sum to 1.
    norm_topk_prob: bool


@dataclass(frozen=True, slots=True)
class ModelSpec:
    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeSpec
    # Added to every norm weight (Gemma stores weight - 1).
    norm_weight_offset: float = 0.0
    # "silu" or "gelu_tanh", of the gated MLP.
    activation: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    # Norms after attention and MLP, before the residual add (Gemma 2/3).
    post_norms: bool = False
    # Multiplies the embedding output (Gemma: sqrt(hidden_size)).
    embedding_scale: float = 1.0
    # Scale of q.k; usually head_dim ** -0.5.
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    final_softcap: float = 0.0
    # Per layer: None for full attention, else the window in tokens (the token itself included).
    sliding_windows: tuple[int | None, ...] = ()
    # Rope of the sliding-window layers where it differs (Gemma 3); None = `rope` everywhere.
    local_rope: RopeSpec | None = None
    tie_word_embeddings: bool = True
    moe: MoESpec | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None

    @property
    def kv_elements_per_token(self) -> int:
        """Elements of K and V per token over all layers."""
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim
