"""Deltas of weights that slime, miles and vime publish for SGLang."""
