"""A gateway's connection to a scheduler on the same machine, past Ray: requests one way, deltas the other, over a Unix socket.

A Ray call costs both sides one to three milliseconds of a processor and several thread switches, whatever it carries; a frame
here costs less than a tenth of that. A frame is a pickle, four bytes of length before it. The socket lies in a folder that only
this user may enter, which is all the authentication there is. Knows no Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import pickle
import shutil
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from scheduler.errors import SchedulerLost, ServingError
from scheduler.wire import Delta, Request
from services.link_folder import SOCKET, make_folder

logger = logging.getLogger(__name__)

_LENGTH_BYTES = 4
_COME_S = 10.0

Refusal = Callable[[Request], Awaitable[ServingError | None]]
Cancel = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class _Hello:
    subscriber: str


@dataclass(frozen=True, slots=True)
class _Submit:
    number: int
    request: Request


@dataclass(frozen=True, slots=True)
class _Answer:
    """refusal: None when the request was taken."""

    number: int
    refusal: ServingError | None


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


class _Frames(asyncio.Protocol):
    """Both ends: whole messages in and out. `_heard` gets each; `_ended` is called once, when the connection is gone."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None
        self._writable = asyncio.Event()
        self.ended = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._writable.set()

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        at = 0
        while (begins := at + _LENGTH_BYTES) <= len(received):
            ends = begins + int.from_bytes(received[at:begins])
            if ends > len(received):
                break
            self._heard(pickle.loads(received[begins:ends]))
            at = ends
        del received[:at]

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_lost(self, error: Exception | None) -> None:
        self._writable.set()
        self.ended.set()
        self._lost()

    def send(self, message: Any) -> None:
        """Nothing when the other side is gone."""
        if self._transport is not None and not self._transport.is_closing():
            payload = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
            self._transport.write(len(payload).to_bytes(_LENGTH_BYTES) + payload)

    async def when_writable(self) -> None:
        """Waits while the other side does not read what was sent; not for one that is gone."""
        await self._writable.wait()

    def close(self) -> None:
        """What was sent still arrives."""
        if self._transport is not None:
            self._transport.close()

    def _heard(self, message: Any) -> None:
        raise NotImplementedError

    def _lost(self) -> None:
        raise NotImplementedError


class Visitor(_Frames):
    """A gateway, as the scheduler sees it. It sends deltas with `send`."""

    def __init__(self, door: Door) -> None:
        super().__init__()
        self._door = door
        self._at_end: Callable[[], None] = lambda: None
        self._work: set[asyncio.Task[None]] = set()

    def _heard(self, message: Any) -> None:
        match message:
            case _Hello(subscriber):
                self._door.welcome(subscriber, self)
            case _Submit(number, request):
                self._do(self._submit(number, request))
            case _Cancel(request_id):
                self._do(self._door.cancel(request_id))

    def when_ended(self, call: Callable[[], None]) -> None:
        """Calls it when the gateway is gone, at once if it is."""
        self._at_end = call
        if self.ended.is_set():
            call()

    def _lost(self) -> None:
        self._door.left(self)
        self._at_end()

    async def _submit(self, number: int, request: Request) -> None:
        self.send(_Answer(number, await self._door.refusal(request)))

    def _do(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._work.discard)


class Door:
    """Where gateways of this machine come in. refusal: submits; why it was refused, None if it was taken."""

    def __init__(self, refusal: Refusal, cancel: Cancel) -> None:
        self.refusal, self.cancel = refusal, cancel
        self._folder: Path | None = None
        self._server: asyncio.Server | None = None
        self._awaited: dict[str, asyncio.Future[Visitor]] = {}
        self._visitors: set[Visitor] = set()

    @property
    def path(self) -> str:
        """Empty when it is not open."""
        return str(self._folder / SOCKET) if self._folder is not None and self._server is not None else ""

    async def open(self) -> None:
        """Raises OSError."""
        self._folder = await asyncio.to_thread(make_folder)
        path = str(self._folder / SOCKET)
        self._server = await asyncio.get_running_loop().create_unix_server(lambda: Visitor(self), path)

    async def close(self) -> None:
        """Nobody comes in any more, and who is in is sent away."""
        if self._server is not None:
            self._server.close()
        for visitor in list(self._visitors):
            visitor.close()
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, True)
            self._folder = None

    @contextlib.asynccontextmanager
    async def visit(self, subscriber: str, timeout_s: float = _COME_S) -> AsyncIterator[Visitor]:
        """The gateway of this name, once it has come; raises SchedulerLost when it does not. It is sent away at the end."""
        awaited = self._awaited[subscriber] = asyncio.get_running_loop().create_future()
        try:
            visitor = await asyncio.wait_for(awaited, timeout_s)
        except TimeoutError:
            raise SchedulerLost(f"{subscriber} did not come") from None
        finally:
            del self._awaited[subscriber]
        try:
            yield visitor
        finally:
            visitor.close()

    def welcome(self, subscriber: str, visitor: Visitor) -> None:
        awaited = self._awaited.get(subscriber)
        if awaited is None or awaited.done():
            visitor.close()
            return
        self._visitors.add(visitor)
        awaited.set_result(visitor)

    def left(self, visitor: Visitor) -> None:
        self._visitors.discard(visitor)


class Link(_Frames):
    """A scheduler, as the gateway sees it."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers = itertools.count()
        self._taken: dict[int, tuple[str, asyncio.Future[None]]] = {}
        self._lists: deque[list[Delta]] = deque()
        self._arrived = asyncio.Event()

    @classmethod
    async def connect(cls, path: str, subscriber: str) -> Link:
        """Raises OSError."""
        _, link = await asyncio.get_running_loop().create_unix_connection(cls, path)
        link.send(_Hello(subscriber))
        return link

    async def submit(self, request: Request) -> None:
        """Returns once the request was taken; raises why not. One that is taken after the caller has given up is cancelled."""
        if self.ended.is_set():
            raise _gone()
        number, taken = next(self._numbers), asyncio.get_running_loop().create_future()
        self._taken[number] = request.request_id, taken
        self.send(_Submit(number, request))
        await taken

    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """One list per step, until the scheduler goes."""
        while self._lists or not self.ended.is_set():
            while self._lists:
                yield self._lists.popleft()
            self._arrived.clear()
            if not self.ended.is_set():
                await self._arrived.wait()

    def _heard(self, message: Any) -> None:
        if isinstance(message, _Answer):
            self._settle(message)
        else:
            self._lists.append(message)
            self._arrived.set()

    def _settle(self, answer: _Answer) -> None:
        request_id, taken = self._taken.pop(answer.number)
        if taken.done():
            if answer.refusal is None:
                self.send(_Cancel(request_id))
        elif answer.refusal is None:
            taken.set_result(None)
        else:
            taken.set_exception(answer.refusal)

    def _lost(self) -> None:
        self._arrived.set()
        for _, taken in self._taken.values():
            if not taken.done():
                taken.set_exception(_gone())
        self._taken.clear()


def _gone() -> SchedulerLost:
    return SchedulerLost("the scheduler is not available")
