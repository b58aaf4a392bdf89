"""Readers under a coverage-guided fuzzer: `make fuzz`.

What a fuzzer has found worth keeping lies in `corpus/`, one folder for each target; the tests read all of it without
the fuzzer. This module imports nothing, for the fuzzer has to see all of Treering being imported.
"""
