"""Reads archives of NumPy (.npz)."""
