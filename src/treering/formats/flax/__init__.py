"""Reads and writes Flax's MessagePack files."""
