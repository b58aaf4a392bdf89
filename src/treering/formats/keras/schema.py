"""The names of Keras's files."""

NAME = "keras"
MAGIC = b"\x89HDF\r\n\x1a\n"  # the beginning of an HDF5 file
INDEX = ".weights.json"  # the ending of the name of an index of files
ARCHIVE = ".keras"
WEIGHTS = "model.weights.h5"  # the file with the weights in an archive
