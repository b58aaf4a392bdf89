"""``python -m treering`` is the `treering` command."""

import sys

from ._cli.main import main

sys.exit(main())
