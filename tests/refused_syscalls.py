"""Makes system calls fail in this process, by seccomp. This simulates kernels and disks that are not available."""

import ctypes
import platform
import struct
import sys

_NUMBERS = {
    "x86_64": (0xC000003E, {"pread64": 17, "madvise": 28}),
    "aarch64": (0xC00000B7, {"pread64": 67, "madvise": 233}),
}
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


def available() -> bool:
    """Returns True if system calls can be refused on this system."""
    return sys.platform == "linux" and platform.machine() in _NUMBERS


def refuse(call: str, code: int) -> None:
    """Makes all calls of one kind fail with an error, in all threads. It cannot be undone."""
    arch, numbers = _NUMBERS[platform.machine()]
    code_of = [  # struct sock_filter: load, jump if equal, return
        (0x20, 0, 0, 4),
        (0x15, 0, 3, arch),
        (0x20, 0, 0, 0),
        (0x15, 0, 1, numbers[call]),
        (0x06, 0, 0, _ERRNO | code),
        (0x06, 0, 0, _ALLOW),
    ]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code_of))
    libc = ctypes.CDLL(None, use_errno=True)
    about = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(code_of), ctypes.addressof(program)))
    if libc.prctl(38, 1, 0, 0, 0):  # PR_SET_NO_NEW_PRIVS
        raise OSError(ctypes.get_errno(), "prctl")
    seccomp = {"x86_64": 317, "aarch64": 277}[platform.machine()]
    if libc.syscall(seccomp, 1, 1, about):  # SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC
        raise OSError(ctypes.get_errno(), "seccomp")
