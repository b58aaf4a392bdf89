"""Implements the rules of `treering.rules`, which change leaves by path."""
