"""Reads and writes T5X's checkpoints."""
