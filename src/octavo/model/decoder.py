"""From a weight file to a model: which tensors there must be, what each is for, packing each once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from octavo.core.errors import ModelFileError
from octavo.core.model_config import ModelConfig
from octavo.kernels.base import Backend, Model, WeightBytes
from octavo.kernels.reference.rope import settled
from octavo.model.registry import build_model, find_architecture
from octavo.model.weight_source import WeightSource
from octavo.weights.dequantise import Encoding, encoded_bytes


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor that a file of this model must hold, and no others."""
    return {name: spec.shape for name, spec in find_architecture(config.architecture).tensors(config).items()}


def weight_bytes(source: WeightSource, backend: Backend) -> WeightBytes:
    """What ``load`` will take, told from the header alone; ``loading`` is the peak on the way."""
    packed = peak = 0
    for name, spec in find_architecture(source.config.architecture).tensors(source.config).items():
        tensor = backend.weight_bytes(source.shape(name), source.encoding(name), spec.uses)
        peak = max(peak, packed + tensor.loading)
        packed += tensor.packed
    return WeightBytes(packed=packed, loading=max(peak, packed))


def repacking_notes(source: WeightSource, backend: Backend) -> tuple[str, ...]:
    """One line per encoding that the backend does not keep as it is in the file: as what, and what that costs."""
    count: Counter[Encoding] = Counter()
    stored: Counter[Encoding] = Counter()
    kept: Counter[Encoding] = Counter()
    for name, spec in find_architecture(source.config.architecture).tensors(source.config).items():
        encoding, shape = source.encoding(name), source.shape(name)
        if len(shape) == 2 and backend.kept_as(encoding) is not None:
            count[encoding] += 1
            stored[encoding] += encoded_bytes(encoding, shape)
            kept[encoding] += backend.weight_bytes(shape, encoding, spec.uses).packed
    return tuple(
        f"weights: {number} tensors of {encoding} are kept as {backend.kept_as(encoding)}, "
        f"{kept[encoding]:,} bytes instead of {stored[encoding]:,}"
        for encoding, number in count.items()
    )


def load(source: WeightSource, backend: Backend, max_model_len: int | None = None) -> Model:
    """Pack every tensor of ``source`` once and build the model, for contexts of up to ``max_model_len`` tokens.

    None: as many as the model takes. It chooses the table of rotations where a model has several (``rope.settled``).
    Raises ``ModelFileError`` for an unknown architecture, a missing tensor or one of another shape. Tensors are read
    one by one, so that beside the packed weights only one tensor is in memory at a time.
    """
    weights = {}
    for name, spec in find_architecture(source.config.architecture).tensors(source.config).items():
        tensor = source.tensor(name)
        if tensor.shape != spec.shape:
            raise ModelFileError(f"tensor {name} has shape {tensor.shape} but the config asks for {spec.shape}")
        weights[name] = backend.pack(tensor, spec.uses)
    return build_model(settled_config(source.config, max_model_len or source.config.max_position), weights)


def settled_config(config: ModelConfig, context: int) -> ModelConfig:
    """The config with every table of rotations settled for contexts of up to ``context`` tokens."""
    ropes = tuple(table and settled(table, context) for table in config.ropes)
    return config if ropes == config.ropes else replace(config, layer_ropes=ropes)
