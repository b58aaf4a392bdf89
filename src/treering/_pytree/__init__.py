"""Flattens pytrees, describes their leaves, and copies their arrays to host memory."""
