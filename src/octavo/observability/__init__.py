"""Records of what happened: trace, metrics, logging."""
