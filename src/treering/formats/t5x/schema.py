"""Names of files in T5X's folders."""

FILE = "checkpoint"
OF_ORBAX = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")  # which may have a file `checkpoint` as well
