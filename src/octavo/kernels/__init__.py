"""Compute: the op seam (base), the written-out truth (reference) and the backends (torch, native)."""
