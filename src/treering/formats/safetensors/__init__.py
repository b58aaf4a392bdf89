"""Reads and writes safetensors files, and folders of them."""
