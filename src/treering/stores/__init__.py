"""Where bytes live. A store knows files and commits; what an array is, it does not know."""

from .posix import Disk

DISK = Disk()  # looked up at each use, so that tests can put a recording or failing double in its place
