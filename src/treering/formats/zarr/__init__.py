"""Reads folders of zarr arrays that no checkpoint library describes."""
