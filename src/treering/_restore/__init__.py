"""From a checkpoint to a pytree."""
