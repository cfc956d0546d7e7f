"""The written-out truth of sampling and dequantisation, in plain numpy."""
