"""Object stores: S3, Google Cloud Storage, Azure, and web servers that are only read.

All requests go through obstore.
"""
