"""What a worker may not do any more once it has loaded its decoders: open connections, start programs, write or remove files,
look into other processes. A filter of system calls; the rest of them stay allowed."""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _MODE_FILTER = 22, 38, 2
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # instructions of the kernel's packet filter
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
_NUMBER, _ARCHITECTURE, _THIRD_ARGUMENT = 0, 4, 32  # where they are in what the filter sees
_OTHER_ABI = 0x40000000  # x32 calls on x86_64 have other numbers, from here on
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# architecture as auditing numbers it; openat; and socket, connect, bind, execve, execveat, ptrace, process_vm_readv,
# process_vm_writev, kill, tkill, io_uring_setup, bpf, mount, unlinkat, renameat, renameat2, truncate, openat2; on x86_64 also
# the older open, creat, unlink, rename and rmdir
_CALLS = {
    "x86_64": (
        0xC000003E, 257,
        (41, 42, 49, 59, 322, 101, 310, 311, 62, 200, 425, 321, 165, 263, 264, 316, 76, 437, 2, 85, 87, 82, 84),
    ),
    "aarch64": (0xC00000B7, 56, (198, 203, 200, 221, 281, 117, 270, 271, 129, 130, 425, 280, 40, 35, 38, 276, 45, 437)),
}  # fmt: skip


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def forbid() -> bool:
    """Answer those calls of this process with EPERM from now on. False: the kernel or the processor has no such filter."""
    libc = ctypes.CDLL(None)
    if platform.machine() not in _CALLS or libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return False
    steps = _program(*_CALLS[platform.machine()])
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    program = _Program(len(steps), ctypes.cast(code, ctypes.c_void_p))
    return bool(libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program), 0, 0) == 0)


def _program(architecture: int, openat: int, forbidden: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """Instructions: what to do, how many to skip where a comparison holds and where not, and a value."""
    count = len(forbidden)
    return [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
        (_AT_LEAST, count + 5, 0, _OTHER_ABI),
        (_EQUAL, 0, 3, openat),
        (_LOAD, 0, 0, _THIRD_ARGUMENT),
        (_ANY_BIT, count + 2, 0, _WRITING),
        (_RETURN, 0, 0, _ALLOW),
        *((_EQUAL, count - place, 0, number) for place, number in enumerate(forbidden)),
        (_RETURN, 0, 0, _ALLOW),
        (_RETURN, 0, 0, _FAIL),
    ]
