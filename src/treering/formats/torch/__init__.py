"""Reads files of PyTorch."""
