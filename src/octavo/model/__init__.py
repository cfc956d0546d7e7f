"""The models: what they are, how files describe them, and their forward pass in terms of ops."""
