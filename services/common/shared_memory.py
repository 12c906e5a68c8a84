"""Memory that another process of this host may read: made without a name, so that nothing is left behind by a process that dies.

The reader opens the maker's descriptor under ``/proc``. That needs both in one PID namespace and of one user; elsewhere
opening fails, and the two talk without it. No torch: bytes only.
"""

from __future__ import annotations

import functools
import os
import resource
from dataclasses import dataclass
from pathlib import Path

_MOST_DESCRIPTORS = 65536


class NotShared(Exception):
    """The memory cannot be opened from here."""


@dataclass(frozen=True)
class Address:
    """Where a block of memory is found.

    Attributes:
        pid: process that holds it.
        descriptor: its descriptor there.
        inode: tells it from another one that took its descriptor's number.
        nbytes: its size.
    """

    pid: int
    descriptor: int
    inode: int
    nbytes: int


class Block:
    """Memory of ``nbytes`` zeros, to be mapped from :attr:`path` by this process; pages come into being where they are written.

    Raises:
        OSError: no descriptor or memory is left, or this is no Linux.
    """

    def __init__(self, nbytes: int) -> None:
        self._descriptor = os.memfd_create("triptych", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._descriptor, nbytes)
            self.address = Address(os.getpid(), self._descriptor, os.fstat(self._descriptor).st_ino, nbytes)
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def path(self) -> str:
        """A file name for this process."""
        return f"/proc/self/fd/{self._descriptor}"

    def close(self) -> None:
        """Nobody can open it any more; who has mapped it keeps it."""
        os.close(self._descriptor)


def open_block(address: Address) -> int:
    """A descriptor for reading, to be closed by the caller.

    Raises:
        NotShared: it is not there, or may not be read from here.
    """
    try:
        descriptor = os.open(f"/proc/{address.pid}/fd/{address.descriptor}", os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise NotShared(str(error)) from None
    found = os.fstat(descriptor)
    if (found.st_ino, found.st_size) != (address.inode, address.nbytes):
        os.close(descriptor)
        raise NotShared("another file is there")
    return descriptor


def descriptors() -> int:
    """How many descriptors this process may have, once it has asked for as many as it can get, within reason."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return _MOST_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft


@functools.cache
def this_place() -> str:
    """Equal for processes that may find each other's memory; empty where the kernel does not tell."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""
