"""Says who owns a file or directory that this user may not change, and what helps."""

import contextlib
import os
import stat


def name_of(user: int) -> str:
    """Returns the number of a user, and the name if the system knows it."""
    with contextlib.suppress(ImportError, KeyError, OSError):  # Windows has no such module.
        import pwd

        return f"user {user} ({pwd.getpwuid(user).pw_name})"
    return f"user {user}"


def described(path: str) -> str:
    """Returns the owner and the mode of what is at a path, itself if it is a link; "" if that does not show."""
    with contextlib.suppress(OSError):
        return f", owned by {_owner(os.lstat(path))}"
    return ""


def explain(error: PermissionError, *paths: str) -> None:
    """Adds to the error of a system call that changes paths who owns the first that this user may not change.

    Does nothing if the error has a text already.
    """
    if hasattr(os, "geteuid") and error.strerror == os.strerror(error.errno or 0):
        error.filename = str(paths[0])  # The system's error has no path above an entry of an open directory.
        for path in paths:
            if why := _why(str(path)):
                error.strerror = f"{error.strerror}: {why}"
                break


def _why(path: str) -> str:
    """Returns why this user may not change a path, or "" if that does not show."""
    folder = os.path.dirname(path)
    with contextlib.suppress(OSError):
        above, user = os.stat(folder), os.geteuid()
        if not _may_write(folder):
            return _not_writable(folder, above)
        found = os.lstat(path)
        if found.st_uid == user:
            return ""
        if above.st_mode & stat.S_ISVTX and above.st_uid != user:
            ask = "ask them" if stat.S_ISDIR(found.st_mode) else f"ask them for `rm {path}`"
            return f"{path} is owned by {_owner(found)}, who alone may remove or move it in a sticky directory; {ask}"
        if stat.S_ISDIR(found.st_mode) or not os.access(path, os.W_OK):
            return _not_writable(path, found)
    return ""


def _not_writable(path: str, found: os.stat_result) -> str:
    above = os.path.dirname(path)
    is_shared = found.st_gid in (os.getegid(), *os.getgroups())
    remedies = [f"ask them for `chmod g+w {path}`"] if is_shared else []
    if stat.S_ISDIR(found.st_mode) and _may_write(above) and not os.stat(above).st_mode & stat.S_ISVTX:
        remedies.append(f"if it is not needed, `mv {path} {path}.old`")
    advice = " or, ".join(remedies) or "choose another place"
    return f"{path} is owned by {_owner(found)}, and {name_of(os.geteuid())} may not write to it; {advice}"


def _may_write(folder: str) -> bool:
    return os.access(folder, os.W_OK | os.X_OK)


def _owner(found: os.stat_result) -> str:
    return f"{name_of(found.st_uid)}, mode {stat.S_IMODE(found.st_mode):o}"
