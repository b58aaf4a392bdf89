"""Starts threads, and contains what threads share."""
