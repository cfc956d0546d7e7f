"""When Python looks for garbage in cycles.

Looking through everything holds the GIL, for 40 ms where large requests live, so it is left for when nobody waits.
Requests themselves leave no cycles; this is for what libraries leave.
"""

from __future__ import annotations

import gc

#: Without a quiet moment: collections of the middle generation until a full one, each for 7,000 containers more.
FULL_COLLECTION = 1000
#: Ticks without work until a collection.
QUIET_TICKS = 10


class QuietCollector:
    """Collects once in each quiet spell in which, or before which, the middle generation has been collected."""

    def __init__(self) -> None:
        self._num_quiet = 0

    def tick(self, *, is_idle: bool) -> None:
        """Call it now and then. is_idle: nobody waits for anything."""
        self._num_quiet = self._num_quiet + 1 if is_idle else 0
        if self._num_quiet >= QUIET_TICKS and gc.get_count()[2] > 0:
            gc.collect()


def collect_seldom() -> None:
    """For a process that has loaded all that it keeps: never look at that again, and seldom at all there is."""
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTION)
    gc.enable()
