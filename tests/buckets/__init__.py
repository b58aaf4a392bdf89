"""What a bucket can look like, after whatever requests of whatever jobs, and what the library makes of it."""
