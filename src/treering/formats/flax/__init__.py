"""Flax: msgpack."""
