"""Operations on checkpoints and runs: convert, compare, check, copy, move, delete and report."""
