"""Mutants of the library: small mistakes, each of which some test must notice. See `__main__`."""
