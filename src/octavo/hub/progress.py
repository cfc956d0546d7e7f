"""A progress bar for downloads: on a terminal a bar, elsewhere one line. Always on standard error."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


class ByteProgress:
    """Context manager around one download of ``total`` bytes (None: not known)."""

    def __init__(self, what: str, total: int | None, *, shown: bool) -> None:
        self._what, self._total, self._shown = what, total, shown
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> ByteProgress:
        if not self._shown:
            return self
        if not sys.stderr.isatty():
            size = f" ({self._total / 1e6:.0f} MB)" if self._total else ""
            print(f"{self._what}{size}", file=sys.stderr, flush=True)
            return self
        # rich takes 80 ms to import: only when there is a bar to draw
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._bar.start()
        self._task = self._bar.add_task(self._what, total=self._total)
        return self

    def update(self, num_bytes: int) -> None:
        """``num_bytes`` have arrived so far."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=num_bytes)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None and self._task is not None:
            if error is None and self._total is not None:
                self._bar.update(self._task, completed=self._total)
            self._bar.stop()
