"""Names of files and keys in T5X's checkpoints."""

FILE = "checkpoint"
VERSIONS = (0, 2, 3)
SPEC = ("driver", "kvstore", "metadata")  # keys that make a map a TensorStore spec
PLACEHOLDER = "PLACEHOLDER://"  # text instead of an array, as old releases of Orbax write it
ORBAX_FILES = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")  # Orbax's folders may have a `checkpoint`, too
