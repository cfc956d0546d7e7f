"""The engine's vocabulary: records and errors. No arrays, no I/O; imports nothing else of octavo."""
