"""Restores a pytree from a checkpoint."""
