"""Orbax."""
