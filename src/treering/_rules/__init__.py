"""Changes of leaves by path."""
