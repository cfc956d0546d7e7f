"""Which backend computes: the native one where it is installed, else torch."""

from __future__ import annotations

from importlib.util import find_spec

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.model_config import ModelConfig
from octavo.kernels.base import Backend


def resolve_backend(wish: EngineConfig) -> str:
    """ "native" or "torch". auto: native, unless it is not installed or the wish names a device other than the CPU."""
    if wish.backend != "auto":
        return wish.backend
    return "native" if wish.device in ("auto", "cpu") and _installed("octavo._native") else "torch"


def create_backend(wish: EngineConfig, config: ModelConfig, *, num_cores: int) -> Backend:
    """The backend for a model. Raises ``ConfigError`` for one that is not installed or cannot do what is wished.

    num_cores: cores that this process may use, for a backend that does not count them itself.
    """
    # late imports: torch takes seconds to import, and neither backend needs the other
    if resolve_backend(wish) == "native":
        if not _installed("octavo._native"):
            raise ConfigError("backend is 'native' but this installation has no native kernels; use --backend torch")
        if wish.device not in ("auto", "cpu"):
            raise ConfigError(f"device is {wish.device!r} but the native backend runs on the CPU; use --backend torch")
        if wish.dtype not in ("auto", "float32"):
            raise ConfigError(
                f"dtype is {wish.dtype!r} but the native backend computes activations in float32; leave --dtype out, "
                "or use --backend torch"
            )
        from octavo.kernels.native.backend import NativeBackend

        return NativeBackend(config, wish.threads, wish.numerics, wish.kv_cache_dtype)
    if not _installed("torch"):
        raise ConfigError("the torch backend needs PyTorch, which is not installed: pip install 'octavo[torch]'")
    if wish.numerics != "exact":
        raise ConfigError("--numerics fast is a choice between kernels of the native backend; torch has none")
    if wish.kv_cache_dtype not in ("auto", wish.dtype):
        raise ConfigError("the torch backend keeps KV in --dtype; leave --kv-cache-dtype out")
    from octavo.kernels.torch.backend import TorchBackend

    return TorchBackend(config, device=wish.device, dtype=wish.dtype, threads=wish.threads or num_cores)


def _installed(module: str) -> bool:
    return find_spec(module) is not None
