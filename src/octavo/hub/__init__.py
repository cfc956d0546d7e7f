"""Getting models: names, downloads, packages, and the cache."""
