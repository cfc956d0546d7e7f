"""Every error that octavo raises on purpose. ``api/error_handlers.py`` maps the tree to HTTP.

OctavoError
├── InvalidRequest              400  the caller's request cannot be served as written
│   ├── PromptTooLong           400  code context_length_exceeded
│   ├── UnsupportedParameter    400  a known field or value that octavo does not have
│   └── NoTokenLeft             400  code no_token_left: the request's masks left no token to draw
├── ModelNotFound               404  the request names a model that is not served
├── QueueFull                   429  the bounded inbox is full; retry after ``retry_after_s``
├── EngineUnavailable           503  loading, draining or dead; retry after ``retry_after_s``
├── ReaderTooSlow               408  the client does not read what it has asked for
├── RequestFailed               500  this request failed inside the engine; others go on
├── ConfigError                 start-up: wishes that contradict each other or the machine
├── ModelFileError              start-up: a model file that is damaged, hostile or unsupported
├── DownloadError               start-up: a model that could not be fetched
└── ServerUnusable              bench serve: somebody's server that cannot be measured
"""

from __future__ import annotations


class OctavoError(Exception):
    """Base of the tree; ``str(error)`` names the value, the limit and the way out."""


class InvalidRequest(OctavoError):
    """The request cannot be served as written. ``param`` names the field at fault, if one is."""

    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(InvalidRequest):
    """Prompt, or prompt plus ``max_tokens``, exceeds the maximum context length."""

    code = "context_length_exceeded"


class UnsupportedParameter(InvalidRequest):
    """A field, or a value of one, that octavo knows of and does not have."""

    code = "unsupported_parameter"


class NoTokenLeft(InvalidRequest):
    """While the answer was made, the request's masks together left no token to draw."""

    code = "no_token_left"


class ModelNotFound(OctavoError):
    """The request names a model that this server does not serve."""


class QueueFull(OctavoError):
    """The bounded inbox is full; the caller should retry after ``retry_after_s``."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineUnavailable(OctavoError):
    """The engine is loading, draining or dead."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ReaderTooSlow(OctavoError):
    """More output has gathered than is kept for a reader. Its request is aborted."""


class RequestFailed(OctavoError):
    """This request failed inside the engine (say, non-finite logits). Others are untouched."""


class ConfigError(OctavoError):
    """Wishes that contradict each other, the model or the machine."""


class ModelFileError(OctavoError):
    """A model file that is damaged, hostile or of an unsupported kind."""


class DownloadError(OctavoError):
    """A model that could not be fetched or did not match its checksum."""


class ServerUnusable(OctavoError):
    """A server that a benchmark was pointed at and that cannot be measured: not there, no access, not OpenAI-like."""
