"""Runs: directories of steps."""
