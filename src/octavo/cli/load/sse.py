"""Server-sent events out of bytes that arrive in any pieces (WHATWG HTML, section 9.2.6)."""

from __future__ import annotations

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")
#: A server that sends this much without a line end is not sending events.
MAX_EVENT_BYTES = 64 << 20


class EventSplitter:
    """Bytes in, the ``data`` of complete events out. Comments, blank lines and other fields are passed over."""

    def __init__(self) -> None:
        self._rest = b""  # an unfinished line
        self._data: list[bytes] = []  # of an unfinished event

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that ``piece`` completes. ValueError for a line without end."""
        buffer = self._rest + piece
        held = b""
        if buffer.endswith(b"\r"):  # perhaps half of a CRLF
            buffer, held = buffer[:-1], b"\r"
        lines = buffer.split(b"\n") if b"\r" not in buffer else _LINE_END.split(buffer)
        self._rest = lines.pop() + held
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"{len(self._rest)} bytes without a line end")
        return [event for line in lines if (event := self._line(line)) is not None]

    def close(self) -> list[bytes]:
        """What an end without a blank line leaves, as some servers leave their [DONE]."""
        lines = (self._rest.removesuffix(b"\r"), b"")
        self._rest = b""
        return [event for line in lines if (event := self._line(line)) is not None]

    def _line(self, line: bytes) -> bytes | None:
        """The event that this line ends, if it does."""
        if line:
            name, _, value = line.partition(b":")
            if name == b"data":
                self._data.append(value.removeprefix(b" "))
            return None
        if not self._data:
            return None
        event = b"\n".join(self._data)
        self._data.clear()
        return event
