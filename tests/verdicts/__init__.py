"""Small checkpoints, right and wrong, and what a reader must find in each: the files in `tests/golden/verdicts`.

Written by hand from `docs/format.md`, without the library. `python -m verdicts` in `tests` adds those that are not there yet; files
that are there are never written again.
"""
