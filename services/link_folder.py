"""Where the sockets of services/local_link.py lie: a folder each, that only this user may enter; those of dead schedulers go.

A scheduler that was killed cannot remove its folder, so the next one does. Knows nothing of what is said over a socket.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path

SOCKET = "link"
_PREFIX = "dspark-link-"
# The names that earlier versions gave; only with a dead socket in it is such a folder known to be ours.
_EARLIER = re.compile(r"dspark-[a-z0-9_]{8}")
# Between making a folder and listening in it lies less than a second.
_LISTENS_WITHIN_S = 60.0
_PRIVATE = 0o700


def make_folder() -> Path:
    """A new one; raises OSError."""
    remove_stale()
    return Path(tempfile.mkdtemp(prefix=_PREFIX))


def remove_stale() -> None:
    """Folders of this user in which nobody listens any more."""
    for folder in Path(tempfile.gettempdir()).glob("dspark-*"):
        with contextlib.suppress(OSError):
            if _is_named_by_us(folder) and _is_ours(folder) and _is_abandoned(folder):
                shutil.rmtree(folder)


def _is_named_by_us(folder: Path) -> bool:
    is_earlier = _EARLIER.fullmatch(folder.name) is not None and (folder / SOCKET).is_socket()
    return folder.name.startswith(_PREFIX) or is_earlier


def _is_ours(folder: Path) -> bool:
    state = folder.lstat()
    is_private_folder = stat.S_ISDIR(state.st_mode) and stat.S_IMODE(state.st_mode) == _PRIVATE
    return is_private_folder and state.st_uid == os.getuid() and time.time() - state.st_mtime > _LISTENS_WITHIN_S


def _is_abandoned(folder: Path) -> bool:
    found = list(folder.iterdir())
    return not found or (found == [folder / SOCKET] and _refuses(folder / SOCKET))


def _refuses(path: Path) -> bool:
    """Only a socket whose process is gone does: one that is busy lets a caller wait."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        return stat.S_ISSOCK(path.lstat().st_mode) and caller.connect_ex(str(path)) == errno.ECONNREFUSED
