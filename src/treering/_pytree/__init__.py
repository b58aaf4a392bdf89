"""Pytrees and their leaves."""
