"""Published weights: a stream of versions, each stored as what has changed since the one before."""
