"""Weight files: their formats, and what the bytes of a tensor mean."""
