"""The scripts under benchmarks/peers are no package: tests find them as the scripts find each other."""

import sys
from pathlib import Path

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path += [str(BENCHMARKS / "peers"), str(BENCHMARKS)]
