"""Zarr arrays, as T5X, Orbax and Levanter have them."""
