"""The models: what they are (config), their files (weights), and their forward pass in terms of ops."""
