"""JSON from files that nobody vouches for: bounded, UTF-8, an object, no key twice."""

from __future__ import annotations

import json
from collections import Counter
from typing import NoReturn

from octavo.core.errors import ModelFileError

#: Room for the header or the index of 30,000 tensors. Items are counted before anything is parsed: ``[],[],...`` would
#: take 25 times its size in memory, and a second to collect.
MAX_JSON_BYTES = 4 << 20
MAX_JSON_ITEMS = 250_000


def parse_object(data: bytes, where: str) -> dict[str, object]:
    """The JSON object in ``data``. ``ModelFileError`` names ``where`` and what is wrong with it."""
    if len(data) > MAX_JSON_BYTES:
        raise ModelFileError(f"{where} has {len(data)} bytes of JSON; at most {MAX_JSON_BYTES} are read")
    if sum(map(data.count, (b",", b"[", b"{"))) > MAX_JSON_ITEMS:
        raise ModelFileError(f"{where} has more than {MAX_JSON_ITEMS} JSON items")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        result = dict(pairs)
        if len(result) < len(pairs):
            twice, times = Counter(key for key, _ in pairs).most_common(1)[0]
            raise ModelFileError(f"{where}: key {twice[:80]!r} appears {times} times")
        return result

    def refuse(text: str) -> NoReturn:
        raise ModelFileError(f"{where}: {text} is not a JSON number")

    try:
        value = json.loads(data.decode(), object_pairs_hook=unique, parse_constant=refuse)
    except RecursionError:
        raise ModelFileError(f"{where}: JSON nested too deeply") from None
    except ValueError as error:  # bad syntax, bad UTF-8, a number of more than 4,300 digits
        raise ModelFileError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ModelFileError(f"{where} must be a JSON object but is a {type(value).__name__}")
    return value
