"""Equinox: `.eqx` files."""
