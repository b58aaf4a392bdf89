"""`python -m fuzz TARGET SECONDS [FOLDER]`: runs the fuzzer on one target. Needs the extra `fuzz`.

The corpus grows in FOLDER (by default a temporary one), starting from `corpus/`.
"""

import logging
import os
import sys
import tempfile
from pathlib import Path

import atheris  # pyright: ignore[reportMissingImports]

with atheris.instrument_imports(include=["treering"]):
    from .targets import CORPUS, TARGETS, one


def main() -> None:
    name, seconds = sys.argv[1], int(sys.argv[2])
    assert name in TARGETS, f"expected one of {', '.join(TARGETS)}"
    logging.disable()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        place = Path(folder) / "x"
        place.mkdir()
        grown = sys.argv[3] if len(sys.argv) > 3 else os.path.join(folder, "grown")
        os.makedirs(grown, exist_ok=True)
        limits = [
            "-max_len=4096",
            "-rss_limit_mb=2048",
            "-timeout=10",
            f"-max_total_time={seconds}",
            "-print_final_stats=1",
        ]
        atheris.Setup([sys.argv[0], grown, str(CORPUS / name), *limits], lambda data: one(name, data, place))
        atheris.Fuzz()


if __name__ == "__main__":
    main()
