"""What the user wishes. Each field carries its sentence, unit and bounds: CLI flags and docs come from here."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from octavo.core.errors import ConfigError

Policy = Literal["fcfs", "priority", "fair"]
Chunking = Literal["adaptive", "fixed"]
StepMode = Literal["mixed", "split"]
Numerics = Literal["exact", "fast"]
LoadFormat = Literal["auto", "dummy"]
# fmt: off
QuantizeFormat = Literal["q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"]
DummyFormat = Literal[
    "F32", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS",
    "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "TQ1_0", "TQ2_0",
]
# fmt: on


def _wish(default: Any, doc: str, *, low: float | None = None, high: float | None = None, unit: str = "") -> Any:
    """A config field with its documentation. Bounds are inclusive and checked at construction."""
    return field(default=default, metadata={"doc": doc, "low": low, "high": high, "unit": unit})


#: Which values a field of a type takes, in Python and in words.
_TYPES: dict[Any, tuple[tuple[type, ...], str]] = {
    bool: ((bool,), "true or false"),
    int: ((int,), "a whole number"),
    float: ((int, float), "a number"),
    str: ((str,), "a string"),
}


def _wanted_type(value: Any, hint: Any) -> str | None:
    """What the field wants instead, or None if ``value`` is of its type. Literals are not looked at."""
    if isinstance(hint, UnionType):
        (hint,) = (part for part in get_args(hint) if part is not NoneType)
        if value is None:
            return None
    if get_origin(hint) is tuple:  # one string would pass for a tuple of its letters
        return None if isinstance(value, tuple) and all(isinstance(v, str) for v in value) else "a tuple of strings"
    if hint not in _TYPES:
        return None
    types, name = _TYPES[hint]
    return None if isinstance(value, types) and isinstance(value, bool) == (hint is bool) else name


def check_fields(config: Any) -> None:
    """Raise ``ConfigError`` for a field of another type, outside its bounds, or outside its Literal's choices."""
    hints = get_type_hints(type(config))
    for f in fields(config):
        value, choices = getattr(config, f.name), get_args(hints[f.name])
        if choices and all(isinstance(c, str) for c in choices) and value not in choices:
            raise ConfigError(f"{f.name} is {value!r} but must be one of {', '.join(choices)}")
        if (wanted := _wanted_type(value, hints[f.name])) is not None:
            raise ConfigError(f"{f.name} is {value!r:.80} but must be {wanted}")
        low, high = f.metadata.get("low"), f.metadata.get("high")
        if not isinstance(value, int | float) or isinstance(value, bool):
            continue
        if (low is not None and value < low) or (high is not None and value > high) or value != value:
            limits = f"at least {low}" if high is None else f"from {low} to {high}"
            raise ConfigError(f"{f.name} is {value!r} but must be {limits}")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """The wish. ``None`` means auto: ``engine/resolve_config.py`` decides from the model and the machine."""

    model: str = _wish("smollm2-135m", "Alias, hub id, folder or path of a .gguf file.")
    load_format: LoadFormat = _wish(
        "auto",
        "auto: what is there; dummy: random weights in the shape that MODEL's config.json or GGUF metadata describes.",
    )
    dummy_format: DummyFormat = _wish("BF16", "dummy: how the matrices are stored.")
    quantize: QuantizeFormat | None = _wish(
        None, "Pack matrices that are F32, F16 or BF16 at load; where rows do not fit, the next wider format."
    )
    backend: Literal["auto", "torch", "native"] = _wish("auto", "Who computes.")
    device: Literal["auto", "cpu", "mps", "cuda"] = _wish("auto", "Device of the torch backend.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _wish("auto", "torch: type of activations.")
    numerics: Numerics = _wish(
        "exact",
        "native: a row's result depends on that row alone, to the last bit; fast may choose the kernel by batch size.",
    )
    kv_cache_dtype: Literal["auto", "float32", "bfloat16"] = _wish(
        "auto", "Type of the KV cache; auto: bfloat16 on native, dtype on torch."
    )
    threads: int | None = _wish(None, "Compute threads; auto: the cores this process may use.", low=1, high=1024)
    max_model_len: int | None = _wish(
        None, "Longest sequence, prompt plus output; auto: what the model and the KV pool allow.", low=1, unit="tokens"
    )
    max_num_seqs: int = _wish(64, "Sequences that run at once.", low=1, high=4096)
    block_size: int = _wish(16, "Tokens per KV block.", low=1, high=256, unit="tokens")
    kv_cache_memory: int | None = _wish(
        None,
        "Size of the KV pool; auto: what max_num_seqs full sequences need, at most half of what the weights leave.",
        low=1,
        unit="bytes",
    )
    enable_prefix_caching: bool = _wish(True, "Keep the KV of finished prompts for prompts that start alike.")
    share_prefix_cache: bool = _wish(False, "Let clients with different API keys share cached prefixes.")
    policy: Policy = _wish("fcfs", "Order of the queue.")
    aging_s: float = _wish(
        10.0, "priority: waiting this long counts as one priority level, so that nobody starves.", low=0.001, unit="s"
    )
    chunking: Chunking = _wish("adaptive", "How prefill is cut: closed loop on measured step time, or a fixed budget.")
    max_num_batched_tokens: int = _wish(
        2048, "Tokens per step at most; also the adaptive sizer's upper bound.", low=1, high=1 << 20, unit="tokens"
    )
    chunk_size: int = _wish(512, "fixed: prefill tokens per step.", low=1, high=1 << 20, unit="tokens")
    target_itl_ms: float | None = _wish(
        None,
        "adaptive: longest step while anyone decodes and no prefill waits for too long; "
        "auto: twice a decode-only step, at least 50.",
        low=1,
        unit="ms",
    )
    max_prefill_wait_s: float = _wish(
        5.0,
        "A prefill kept waiting this long by the budget alone stretches the target, to 4 times at twice the wait.",
        low=0.01,
        unit="s",
    )
    step_mode: StepMode = _wish("mixed", "Chunks and decodes in one pass, or as two (for comparison).")
    max_queue: int = _wish(1024, "Requests that may wait; one more gets 429.", low=1, high=1 << 20)
    chat_template: str | None = _wish(None, "File with a Jinja chat template that replaces the model's own.")
    allow_special_in_content: bool = _wish(False, "Parse control tokens inside message content.")
    trace_steps: int = _wish(4096, "Step records kept in memory.", low=16, high=1 << 20)

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The wish for the HTTP server."""

    host: str = _wish("127.0.0.1", "Address to listen on.")
    port: int = _wish(8000, "Port to listen on; 0 takes a free one.", low=0, high=65535)
    served_model_name: str | None = _wish(None, "Name that clients use; auto: the model's alias or file name.")
    api_key: tuple[str, ...] = _wish((), "Key that clients must send as a bearer token; may be given more than once.")
    admin_key: tuple[str, ...] = _wish((), "Key that may see everybody's requests on the debug routes.")
    allowed_host: tuple[str, ...] = _wish((), "Further Host header values accepted on a loopback bind.")
    cors_origin: tuple[str, ...] = _wish((), "Browser origins that may call this server.")
    most_urgent_priority: int = _wish(
        0,
        "Lowest number, that is most urgent priority, that a client without an admin key may ask for; what it does not "
        "ask for is 0, or this if it is higher.",
        low=-(2**31),
        high=2**31 - 1,
    )
    max_connections: int | None = _wish(
        None,
        "Open connections; auto: what the limit of descriptors allows, at most 4096. One more closes the oldest that "
        "has no request in progress.",
        low=8,
        high=1 << 20,
    )
    keep_alive_s: float = _wish(
        75.0,
        "Close a connection that has been idle this long between two requests; longer than a proxy in front keeps it.",
        low=0.1,
        high=3600,
        unit="s",
    )
    drain_s: float = _wish(10.0, "On shutdown, wait this long for running requests.", low=0, high=3600, unit="s")
    exit_on_engine_death: bool = _wish(
        True, "If the engine's thread ends, end the process too, with an error, so that a supervisor restarts it."
    )
    log_level: Literal["debug", "info", "warning", "error"] = _wish("info", "What is logged.")

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("api_key", "admin_key"):
            if any(key != key.strip() or not key for key in getattr(self, name)):
                raise ConfigError(f"{name} is empty or begins or ends with white space, which no client could send")


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedConfig:
    """What the engine runs with: every auto decided. Printed once at start."""

    wish: EngineConfig
    model_path: str
    model_name: str
    backend: str
    device: str
    dtype: str
    kv_dtype: str
    threads: int
    max_model_len: int
    max_num_seqs: int
    block_size: int
    cache_groups: tuple[tuple[str, int], ...]  # (what its layers keep, blocks) of each
    kv_cache_bytes: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    system_fingerprint: str
    weights_bytes: int = 0
    chat_template: str = "the model's own"  # or its file, or why there is none
    notes: tuple[str, ...] = ()  # what was decided and why, one line each

    @property
    def serves_chat(self) -> bool:
        """Whether there is a chat template that works."""
        return self.wish.chat_template is not None or self.chat_template == "the model's own"

    @property
    def num_blocks(self) -> int:
        """Of the first cache group, which keeps most."""
        return self.cache_groups[0][1]
