"""Coordinates the processes of a job."""
