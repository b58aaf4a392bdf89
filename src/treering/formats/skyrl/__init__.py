"""Deltas of weights that SkyRL publishes."""
