"""Reads and writes Orbax checkpoints."""
