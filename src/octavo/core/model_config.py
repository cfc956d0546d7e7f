"""The shape of a model, from whichever file described it."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.cache_group import CacheGroup, group_by_window


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies were stretched for long contexts."""

    kind: str  # "linear" | "llama3"
    factor: float
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_context: int = 8192  # llama3


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """What the decoder needs to know. Names follow Hugging Face's ``config.json`` where it has one."""

    architecture: str  # key of model/registry.py: "llama", ...
    name: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int  # tokens of context the model was trained for
    rms_norm_eps: float
    rope_theta: float
    rope_dim: int  # leading dimensions of a head that are rotated; head_dim unless partial
    tied_embeddings: bool
    rope_scaling: RopeScaling | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    hidden_act: str = "silu"  # gated_mul's activation: "silu" | "gelu"
    sliding_window: int | None = None
    attention_soft_cap: float | None = None
    logits_soft_cap: float | None = None
    layer_windows: tuple[int | None, ...] = ()  # of each layer; (): all have ``sliding_window``

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None: it sees everything."""
        return self.layer_windows or (self.sliding_window,) * self.num_layers

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """What its layers keep. A window that no context leaves keeps everything."""
        return group_by_window([w if w is not None and w < self.max_position else None for w in self.windows])
