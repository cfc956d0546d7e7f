"""What every weight file offers, whatever its format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from octavo.core.model_config import ModelConfig
from octavo.kernels.weight_tensor import Encoding, WeightTensor

#: The names that architectures use. Readers translate their own format's names into these, "{i}" is the layer.
#: Q and K rows are in rotate-half order (pairs i and i + head_dim/2): the GGUF reader undoes llama's interleaving.
CANONICAL_NAMES = (
    "embedding.weight",  # [vocab, hidden]
    "layers.{i}.attention_norm.weight",  # [hidden]
    "layers.{i}.q.weight",  # [heads * head_dim, hidden]; .bias [heads * head_dim] where attention_bias
    "layers.{i}.k.weight",
    "layers.{i}.v.weight",
    "layers.{i}.o.weight",  # [hidden, heads * head_dim]
    "layers.{i}.mlp_norm.weight",  # [hidden]
    "layers.{i}.gate.weight",  # [intermediate, hidden]
    "layers.{i}.up.weight",
    "layers.{i}.down.weight",  # [hidden, intermediate]
    "final_norm.weight",  # [hidden]
    "head.weight",  # [vocab, hidden]; absent when tied
)


class WeightSource(ABC):
    """An opened model file or folder: its config and its tensors by canonical name."""

    config: ModelConfig
    fingerprint: (
        str  # short hash of what was read (names, shapes, encodings, sizes, metadata): goes into system_fingerprint
    )

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Canonical names of all tensors present; names the reader cannot translate are given as they are."""

    @abstractmethod
    def tensor(self, name: str) -> WeightTensor:
        """The tensor; raises ``ModelFileError`` if there is none of that name."""

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape; readers that can tell it without touching the data override this."""
        return self.tensor(name).shape

    def encoding(self, name: str) -> Encoding:
        """How the tensor is stored; likewise."""
        return self.tensor(name).encoding

    @abstractmethod
    def close(self) -> None:
        """Unmap the file. Tensors handed out earlier must not be used afterwards."""
