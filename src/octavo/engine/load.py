"""From a wish to a loaded engine: files, weights, KV pool, scheduler, warm-up."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from pathlib import Path

from octavo._version import __version__
from octavo.core.config import EngineConfig, ResolvedConfig
from octavo.engine.engine import Engine
from octavo.engine.model_runner import ModelRunner
from octavo.engine.resolve_config import check_context, check_weights_fit, free_beside, size_pool
from octavo.hub.resolve import resolve_model
from octavo.kernels.base import Backend, KVCacheLayout
from octavo.kernels.machine import probe_machine
from octavo.kernels.select import create_backend
from octavo.model import decoder
from octavo.model.dummy import DummyWeights, open_dummy
from octavo.model.gguf_model import GGUFWeights
from octavo.model.open_model import check_complete, open_weights
from octavo.model.quantised import QuantisedWeights
from octavo.model.weight_source import WeightSource
from octavo.observability.metrics import Metrics
from octavo.observability.trace import Tracer
from octavo.scheduler.scheduler import Scheduler
from octavo.text.choose_template import choose_template
from octavo.text.dummy_vocabulary import dummy_vocabulary
from octavo.text.tokenizer import Tokenizer


def load_engine(wish: EngineConfig) -> Engine:
    """Load the model, size the pool, warm up. Raises ConfigError, ModelFileError or DownloadError."""
    started = time.perf_counter()
    found = resolve_model(wish.model)
    source = open_weights(found.path) if wish.load_format == "auto" else open_dummy(found.path, wish.dummy_format)
    machine = probe_machine()
    check_complete(source, decoder.expected_tensors(source.config))
    tokenizer = _tokenizer(source, found.path)
    if wish.quantize is not None:
        source = QuantisedWeights(source, wish.quantize)
    check_context(wish, source.config)
    chat_template, which_template = choose_template(wish, tokenizer)
    backend = create_backend(wish, source.config, num_cores=machine.num_cores)
    weights = decoder.weight_bytes(source, backend)
    check_weights_fit(source.config, weights, machine)
    model = decoder.load(source, backend, wish.max_model_len)
    backend.bind(model, max_tokens=wish.max_num_batched_tokens + wish.max_num_seqs, max_seqs=wish.max_num_seqs)
    free_bytes = backend.device_free_bytes()
    if free_bytes is None:
        free_bytes = free_beside(weights, backend.scratch_bytes(), machine, probe_machine())
    groups = source.config.cache_groups
    block_bytes = [wish.block_size * backend.kv_bytes_per_token(source.config, len(group.layers)) for group in groups]
    pool = size_pool(wish, source.config, free_bytes, groups, block_bytes)
    kv_bytes = backend.allocate_kv_cache(
        KVCacheLayout(
            groups=groups,
            num_blocks=pool.num_blocks,
            block_size=wish.block_size,
            num_kv_heads=source.config.num_kv_heads,
            head_dim=source.config.head_dim,
        )
    )
    cost = backend.model_cost()
    config = ResolvedConfig(
        wish=wish,
        model_path=str(found.path),
        model_name=found.name,
        backend=backend.name,
        device=backend.device,
        dtype=backend.dtype,
        kv_dtype=backend.kv_dtype,
        threads=backend.threads,
        max_model_len=pool.max_model_len,
        max_num_seqs=wish.max_num_seqs,
        block_size=wish.block_size,
        cache_groups=tuple((group.name, n) for group, n in zip(groups, pool.num_blocks, strict=True)),
        kv_cache_bytes=kv_bytes,
        vocab_size=source.config.vocab_size,
        eos_token_ids=tokenizer.eos_token_ids | (chat_template.end_token_ids if chat_template else frozenset()),
        system_fingerprint=_fingerprint(backend.fingerprint, source.fingerprint),
        weights_bytes=cost.weights_bytes if cost is not None else 0,
        chat_template=which_template,
        notes=(*_weight_notes(wish, source, backend), *pool.notes),
    )
    runner = ModelRunner(backend, block_size=wish.block_size, num_groups=len(groups), step_mode=wish.step_mode)
    runner.warm_up(wish.max_num_batched_tokens)
    tracer = Tracer(Metrics(), max_steps=wish.trace_steps)
    scheduler = Scheduler.from_config(wish, groups=groups, num_blocks=pool.num_blocks, max_model_len=pool.max_model_len)
    return Engine(
        config=config,
        tokenizer=tokenizer,
        chat_template=chat_template,
        scheduler=scheduler,
        runner=runner,
        tracer=tracer,
        load_s=time.perf_counter() - started,
    )


def _tokenizer(source: WeightSource, path: Path) -> Tokenizer:
    """The tokenizer that comes with the weights: GGUF metadata, or the files beside them. Dummy weights need none."""
    if isinstance(source, DummyWeights) and (source.metadata or not (path / "tokenizer.json").exists()):
        return Tokenizer.from_gguf(source.metadata or dummy_vocabulary(source.config.vocab_size))
    if isinstance(source, GGUFWeights):
        return Tokenizer.from_gguf(source.file.metadata)
    return Tokenizer.from_folder(path if path.is_dir() else path.parent)


def _weight_notes(wish: EngineConfig, source: WeightSource, backend: Backend) -> Iterator[str]:
    """What of the weights is not as the file has it."""
    if wish.load_format == "dummy":
        yield f"weights: random {wish.dummy_format}"
    if isinstance(source, QuantisedWeights):
        yield from source.notes()
    yield from decoder.repacking_notes(source, backend)


def _fingerprint(*parts: str) -> str:
    """Hash of version, kernels, determinism mode and weights: equal fingerprints promise equal tokens."""
    digest = hashlib.sha256("\n".join((__version__, *parts)).encode()).hexdigest()
    return f"octavo_{digest[:12]}"
