"""Runs: directories that hold one checkpoint for each saved step."""
