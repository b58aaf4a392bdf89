"""Names of files in T5X's folders."""

FILE = "checkpoint"
VERSIONS = (0, 2, 3)
SPEC = ("driver", "kvstore", "metadata")  # what makes a map a TensorStore spec
PLACEHOLDER = "PLACEHOLDER://"  # text in place of an array, as old releases of Orbax have it
OF_ORBAX = ("_METADATA", "_CHECKPOINT_METADATA", "manifest.ocdbt")  # which may have a file `checkpoint` as well
