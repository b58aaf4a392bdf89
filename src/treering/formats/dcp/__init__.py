"""Reads PyTorch's distributed checkpoints (DCP)."""
