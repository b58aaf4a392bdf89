"""The names of objects in a bucket, whose root has the name ""."""


def joined(folder: str, name: str) -> str:
    """The key, or URL, of what has a name in a folder."""
    return f"{folder}/{name}" if folder and name else folder or name


def below(folder: str, key: str) -> str:
    """The name within a folder of an object that is in it, or in folders below."""
    return key[len(folder) + 1 :] if folder else key
