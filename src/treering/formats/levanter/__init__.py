"""Reads and writes Levanter's checkpoints."""
