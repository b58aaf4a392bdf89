"""TensorFlow's checkpoints."""
