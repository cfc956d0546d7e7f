"""One file per architecture, found by its model_type."""
