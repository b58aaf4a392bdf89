"""Reads TensorFlow's checkpoints."""
