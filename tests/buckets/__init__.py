"""Explores the states of a bucket after requests of several jobs, and what the library makes of each state."""
