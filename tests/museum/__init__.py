"""Public reports of state that was lost or changed without a word, rebuilt as small programs."""
