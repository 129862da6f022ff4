"""Keep freed memory for the next step instead of handing it back to the operating system.

The C library gives large blocks back as soon as they are freed, and each one that is taken
anew costs a page fault every 4 KiB: on nets with large activations or weights a third of a
step. A training step takes the same blocks again and again, so it pays to keep them, as
GPU allocators do. The process then stays as large as its largest step.
"""

from __future__ import annotations

import ctypes

# Names and numbers from <malloc.h> of glibc, where negative numbers are parameters of mallopt.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_KEPT_BYTES = 2**31 - 1  # mallopt takes an int


def keep_freed_memory() -> bool:
    """Ask the C library of this process to keep freed memory; tell whether it can.

    It holds for the whole process from now on. Only glibc can.
    """
    library = ctypes.CDLL(None)
    if not hasattr(library, "mallopt") or not hasattr(library, "gnu_get_libc_version"):
        return False
    settings = ((_M_MMAP_THRESHOLD, _KEPT_BYTES), (_M_TRIM_THRESHOLD, _KEPT_BYTES))
    return all(library.mallopt(parameter, value) == 1 for parameter, value in settings)
