"""Pure decisions: what to run next, for whom, how much of it, and who gives way. No arrays, no clock of its own."""
