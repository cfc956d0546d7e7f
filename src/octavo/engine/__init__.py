"""The loop that joins scheduler and runner, and the thread around it."""
