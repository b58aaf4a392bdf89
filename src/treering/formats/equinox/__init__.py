"""Reads and writes Equinox's `.eqx` files."""
