"""Architectures by name, imported only when a file asks for one."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol, cast

from octavo.core.errors import ModelFileError
from octavo.core.model_config import ModelConfig
from octavo.kernels.base import Model, Weight
from octavo.model.gguf_keys import GGUFKeys
from octavo.model.hf_fields import HFFields
from octavo.model.layers import TensorSpec
from octavo.model.tensor_names import TensorNames

#: ``general.architecture`` of a GGUF file, and ``model_type`` of a config.json -> (module under
#: octavo.model.architectures, class). Nothing is imported until it is needed.
ARCHITECTURES = {
    "llama": ("llama", "Llama"),
    "qwen2": ("qwen2", "Qwen2"),
    "qwen3": ("qwen3", "Qwen3"),
    "mistral": ("mistral", "Mistral"),
    "mistral3": ("mistral", "Ministral3"),
    "ministral3": ("mistral", "Ministral3"),
    "gemma2": ("gemma2", "Gemma2"),
    "gemma3": ("gemma3", "Gemma3"),
    "gemma3_text": ("gemma3", "Gemma3"),
    "phi3": ("phi3", "Phi3"),
    "granite": ("granite", "Granite"),
    "smollm3": ("smollm3", "SmolLM3"),
    "olmo2": ("olmo2", "Olmo2"),
    "olmo3": ("olmo2", "Olmo3"),
    "glm4": ("glm4", "Glm4"),
    "exaone4": ("exaone4", "Exaone4"),
    "cohere2": ("cohere2", "Cohere2"),
    "starcoder2": ("starcoder2", "Starcoder2"),
    "gpt_neox": ("gpt_neox", "GPTNeoX"),
    "gptneox": ("gpt_neox", "GPTNeoX"),
}


class Architecture(Protocol):
    """What a module of ``architectures/`` offers: a class whose instances are ``kernels.base.Model``."""

    names: TensorNames  # of all its tensors
    interleaved: frozenset[str]  # parts of a layer whose rows its GGUF files pair as RoPE rotates them: 2j with 2j + 1
    interleaved_in_hf: frozenset[str]  # the same of its safetensors
    fused: Mapping[str, tuple[str, ...]]  # matrices of a layer that files have as one -> what they consist of, in order
    fused_by_head: bool  # "qkv" in safetensors has the parts of one head after the other
    unit_offset: bool  # gains of norms in safetensors are 1 less than what rows are multiplied by

    def from_gguf(self, keys: GGUFKeys) -> ModelConfig:
        """The shape that a GGUF file's metadata describes. Raises ``ModelFileError`` for a key that is not known."""
        ...

    def from_hf(self, fields: HFFields) -> ModelConfig:
        """The shape that a config.json describes."""
        ...

    def tensors(self, config: ModelConfig) -> dict[str, TensorSpec]:
        """Every tensor of the model: canonical name -> shape and uses."""
        ...

    def __call__(self, config: ModelConfig, weights: Mapping[str, Weight]) -> Model:
        """The model over its packed weights, by canonical name."""
        ...


def known_architectures() -> str:
    """Their names, for messages."""
    return ", ".join(sorted(ARCHITECTURES))


def find_architecture(name: str) -> Architecture:
    """The architecture of that name; raises ``ModelFileError`` naming the known ones."""
    if name not in ARCHITECTURES:
        raise ModelFileError(f"architecture {name!r} is not supported; octavo knows {known_architectures()}")
    module, cls = ARCHITECTURES[name]
    return cast(Architecture, getattr(import_module(f"octavo.model.architectures.{module}"), cls))


def build_model(config: ModelConfig, weights: Mapping[str, Weight]) -> Model:
    """The model that ``config`` describes over packed weights; ``decoder.load`` does this from a file."""
    return find_architecture(config.architecture)(config, weights)
