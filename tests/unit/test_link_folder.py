"""What a killed scheduler left in the folder for temporary files goes at the next start, and nothing else does."""

from __future__ import annotations

import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.link_folder import SOCKET, make_folder, remove_stale


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # a short path: that of a socket has some hundred bytes
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def age(folder: Path, seconds: float = 3600) -> Path:
    os.utime(folder, (time.time() - seconds,) * 2)
    return folder


def listening(folder: Path) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(folder / SOCKET))
    server.listen(0)
    return server


def test_folders_of_dead_schedulers_are_removed_at_the_next_start(temporary: Path) -> None:
    dead, empty = make_folder(), make_folder()
    listening(dead).close()
    age(dead)
    age(empty)
    fresh = make_folder()
    assert list(temporary.iterdir()) == [fresh]


def test_a_socket_that_somebody_listens_on_stays_also_when_its_queue_is_full(temporary: Path) -> None:
    folder = make_folder()
    with listening(folder), socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
        age(folder)
        for caller in (first, second):
            caller.setblocking(False)
            caller.connect_ex(str(folder / SOCKET))
        remove_stale()
        assert (folder / SOCKET).is_socket()


def earlier(temporary: Path, name: str) -> Path:
    folder = temporary / f"dspark-{name}"
    folder.mkdir(0o700)
    return folder


def test_folders_as_earlier_versions_named_them_go_when_a_dead_socket_lies_in_them(temporary: Path) -> None:
    dead, alive, empty, other = (earlier(temporary, name) for name in ("1ajo5gtl", "po_q2nya", "notes_01", "results"))
    with listening(alive):
        for folder in (dead, other):
            listening(folder).close()
        for folder in (dead, alive, empty, other):
            age(folder)
        remove_stale()
        assert sorted(temporary.iterdir()) == sorted([alive, empty, other])


def test_what_is_new_another_name_a_link_open_to_others_or_holds_something_else_stays(temporary: Path) -> None:
    new = make_folder()
    other_name = temporary / "dspark-notes"
    other_name.mkdir(0o700)
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir(0o700)
    link = temporary / "dspark-link-to"
    link.symlink_to(elsewhere)
    shared = make_folder()
    shared.chmod(0o755)
    full, plain = make_folder(), make_folder()
    (full / "notes.txt").write_text("mine")
    (plain / SOCKET).write_text("no socket")
    for folder in (other_name, elsewhere, shared, full, plain):
        age(folder)
    before = sorted(temporary.iterdir())
    remove_stale()
    assert sorted(temporary.iterdir()) == before and new in before and link in before


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder away")
def test_another_users_folder_stays(temporary: Path) -> None:
    folder = make_folder()
    os.chown(folder, 65534, 65534)
    age(folder)
    remove_stale()
    assert folder.exists()
