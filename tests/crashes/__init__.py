"""Crashes of every scenario at every point: what each may leave on the disk, and whether that is what is promised.

`scenarios` say what is under way and what must be true, `recording` keeps the log of it, `states` are what a crash may
make of a log, `checks` look at them with the library, `mutations` are logs of a careless library, and `campaign` does
it all: `make faults-disk`.
"""
