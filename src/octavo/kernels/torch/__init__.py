"""The PyTorch backend: eager, readable, any torch device; the oracle of the tests."""

import os

# OpenMP reads this when torch is first imported. By default its threads spin while they wait for each other, so once
# the event loop or a client on the same machine needs a core, every op waits for a time slice of the scheduler: on two
# cores, one of them busy, a decode step of the default model took 1,200 ms. Threads that sleep took 95 ms there, and
# 90 instead of 82 ms on idle cores.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
