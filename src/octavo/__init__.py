"""octavo: an LLM inference engine that shows and explains every decision it makes.

>>> from octavo import LLM, SamplingParams                                # doctest: +SKIP
>>> LLM().generate("The capital of France is", SamplingParams())[0].text  # doctest: +SKIP
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo._version import __version__
from octavo.core.config import EngineConfig
from octavo.core.errors import (
    ConfigError,
    DownloadError,
    EngineUnavailable,
    InvalidRequest,
    ModelFileError,
    ModelNotFound,
    OctavoError,
    PromptTooLong,
    QueueFull,
    RequestFailed,
    UnsupportedParameter,
)
from octavo.core.output import RequestOutput
from octavo.core.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.engine.async_engine import AsyncEngine
    from octavo.llm import LLM

__all__ = [
    "LLM",
    "AsyncEngine",
    "ConfigError",
    "DownloadError",
    "EngineConfig",
    "EngineUnavailable",
    "InvalidRequest",
    "ModelFileError",
    "ModelNotFound",
    "OctavoError",
    "PromptTooLong",
    "QueueFull",
    "RequestFailed",
    "RequestOutput",
    "SamplingParams",
    "UnsupportedParameter",
    "__version__",
]

_LATE = {"LLM": "octavo.llm", "AsyncEngine": "octavo.engine.async_engine"}


def __getattr__(name: str) -> Any:
    """Load the engines when first asked for: ``import octavo`` and ``octavo --help`` stay light."""
    if name in _LATE:
        from importlib import import_module

        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
