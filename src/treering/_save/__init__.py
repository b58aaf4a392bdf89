"""From a pytree to a checkpoint."""
