"""Archives of NumPy (.npz)."""
