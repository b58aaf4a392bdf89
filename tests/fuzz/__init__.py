"""Readers under a coverage-guided fuzzer: `make fuzz`.

`corpus/` has a folder of inputs for each target; the tests read all of them without the fuzzer. This module imports
nothing, because the fuzzer must see every import of Treering.
"""
