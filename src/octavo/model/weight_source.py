"""What every weight file offers, whatever its format."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

from octavo.core.model_config import ModelConfig
from octavo.weights.dequantise import Encoding
from octavo.weights.tensor import WeightTensor


class WeightSource(ABC):
    """An opened model file or folder: its config and its tensors by canonical name (``TensorNames``).

    Rows of Q and K are in rotate-half order (pairs i and i + rope_dim / 2), whatever the file's is.
    """

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
