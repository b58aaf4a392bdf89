"""Makes the files in `tests/golden/verdicts`: small checkpoints, with what a reader must find in each.

The cases are written by hand from `docs/format.md` and do not use the library. `python -m format_cases`, called in `tests`, adds
missing files and never rewrites existing ones. `verdicts.json` has the text of every case, so these texts stay as they were
first written.
"""
