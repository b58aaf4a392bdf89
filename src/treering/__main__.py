"""The program `treering`, and ``python -m treering``."""

import sys


def main() -> int:
    """Runs the command. Ctrl-C ends it quietly also while the modules of the command are imported."""
    try:
        from ._cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
