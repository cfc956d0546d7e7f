"""The shape of a model, from whichever file described it."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.cache_group import CacheGroup, group_by_window


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies were stretched for long contexts: ``kernels/reference/rope.py`` has the rules."""

    kind: str  # "linear" | "llama3" | "yarn"; "longrope", "dynamic": see ``settled``
    factor: float = 1.0  # longrope has one per pair instead, ``divisors``
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_context: int = 8192  # llama3, yarn: tokens that the model saw before it was stretched
    beta_fast: float = 32.0  # yarn: a pair that turns so often within the original context stays
    beta_slow: float = 1.0  # yarn: one that turns so seldom is divided by ``factor``
    truncate: bool = True  # yarn: the bounds between the two are whole pairs
    divisors: tuple[float, ...] = ()  # longrope: of each pair's frequency
    short_divisors: tuple[float, ...] = ()  # longrope: those of a context that is at most the original one
    attention_factor: float = 1.0  # cos and sin times this: queries and keys grow, scores by its square


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeTable:
    """What makes a table of rotations. A model may have several, one for each kind of layer."""

    theta: float
    dim: int  # leading dimensions of a head that are rotated, in pairs i, i + dim / 2
    scaling: RopeScaling | None = None


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
    layer_ropes: tuple[RopeTable | None, ...] = ()  # of each layer, None: not rotated; (): all have rope_theta, ...

    @property
    def ropes(self) -> tuple[RopeTable | None, ...]:
        """The table of each layer; None: its queries and keys are not rotated."""
        alike = RopeTable(theta=self.rope_theta, dim=self.rope_dim, scaling=self.rope_scaling)
        return self.layer_ropes or (alike,) * self.num_layers

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None: it sees everything."""
        return self.layer_windows or (self.sliding_window,) * self.num_layers

    @property
    def cache_groups(self) -> tuple[CacheGroup, ...]:
        """What its layers keep. A window that no context leaves keeps everything."""
        return group_by_window([w if w is not None and w < self.max_position else None for w in self.windows])
