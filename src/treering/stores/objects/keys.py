"""The names of objects in a bucket. The bucket's root has the name ""."""


def join_key(folder: str, name: str) -> str:
    """Returns the key or URL of a name in a folder."""
    return f"{folder}/{name}" if folder and name else folder or name


def relative_key(folder: str, key: str) -> str:
    """Returns the name within a folder of an object below it."""
    return key[len(folder) + 1 :] if folder else key
