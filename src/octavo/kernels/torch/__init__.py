"""The PyTorch backend: eager, readable, any torch device; the oracle of the tests."""
