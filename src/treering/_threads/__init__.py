"""Threads and what they share."""
