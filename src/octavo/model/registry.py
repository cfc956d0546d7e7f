"""Architectures by name, imported only when a file asks for one."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol, cast

from octavo.core.errors import ModelFileError
from octavo.core.model_config import ModelConfig
from octavo.kernels.base import Model, Weight
from octavo.model.layers import TensorSpec

#: ModelConfig.architecture -> (module under octavo.model.architectures, class). Nothing is imported until it is needed.
ARCHITECTURES = {"llama": ("llama", "Llama")}


class Architecture(Protocol):
    """What a module of ``architectures/`` offers: a class whose instances are ``kernels.base.Model``."""

    def __call__(self, config: ModelConfig, weights: Mapping[str, Weight]) -> Model:
        """The model over its packed weights, by canonical name."""
        ...

    def tensors(self, config: ModelConfig) -> dict[str, TensorSpec]:
        """Every tensor of the model: canonical name -> shape and uses."""
        ...


def find_architecture(name: str) -> Architecture:
    """The architecture of that name; raises ``ModelFileError`` naming the known ones."""
    if name not in ARCHITECTURES:
        raise ModelFileError(f"architecture {name!r} is not supported; octavo knows {', '.join(sorted(ARCHITECTURES))}")
    module, cls = ARCHITECTURES[name]
    return cast(Architecture, getattr(import_module(f"octavo.model.architectures.{module}"), cls))


def build_model(config: ModelConfig, weights: Mapping[str, Weight]) -> Model:
    """The model that ``config`` describes over packed weights; ``decoder.load`` does this from a file."""
    return find_architecture(config.architecture)(config, weights)
