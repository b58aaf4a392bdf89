"""Saves a pytree as a checkpoint."""
