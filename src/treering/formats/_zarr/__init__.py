"""Reads and writes zarr arrays, which the checkpoints of T5X, Orbax and Levanter consist of."""
