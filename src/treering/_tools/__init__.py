"""Whole checkpoints converted, compared and checked."""
