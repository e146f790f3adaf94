"""What this process and its children can no longer do, from before the first import of vLLM."""

from __future__ import annotations

import ctypes
import os
import sys

_PR_SET_NO_NEW_PRIVS = 38


def confine() -> None:
    """Make new files private, and programs with set-uid bits run without those.

    Both are inherited by every process started from here, and neither can be taken back by code
    that is not root's.
    """
    os.umask(0o077)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS) failed")
