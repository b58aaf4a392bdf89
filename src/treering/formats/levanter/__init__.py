"""Levanter: zarr arrays by TensorStore."""
