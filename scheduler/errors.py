"""Every way a request can fail to be served, drawn as a tree and mapped once to HTTP in services/gateway/errors.py.

    ServingError
    |-- Rejected                never started; the client can change something
    |   |-- BadParams           a parameter is wrong or unsupported (names it)
    |   |-- TooLong             prompt + max_tokens do not fit the context
    |   `-- Overloaded          waiting queue is full (retry later)
    |-- Failed                  started, or could have, and the server could not finish
    |   |-- VerifierLost        the target's worker died and did not come back in time
    |   |-- SchedulerLost       the scheduler is not there: it starts, restarts or died under the request
    |   |-- DrafterLost         never shown to clients: requests decode plainly until it is back
    |   |-- DeadlineExceeded    the request's time ran out
    |   |-- ShuttingDown        the server is draining
    |   `-- InternalFault       a bug of ours
    `-- Cancelled               the client went away

`SettingsError` stands beside the tree: a start that is refused.
"""

from __future__ import annotations


class ServingError(Exception):
    """Root. `str(error)` is the message shown to the client."""


class Rejected(ServingError):
    pass


class BadParams(Rejected):
    """`param` names the field as the client wrote it."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class TooLong(Rejected):
    """`room`: the largest max_tokens that fits; 0 when the prompt by itself is too long."""

    def __init__(self, message: str, room: int = 0) -> None:
        super().__init__(message)
        self.room = room


class Overloaded(Rejected):
    """`retry_after_s`: seconds after which trying again is sensible."""

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class Failed(ServingError):
    pass


class VerifierLost(Failed):
    pass


class SchedulerLost(Failed):
    pass


class DrafterLost(Failed):
    pass


class DeadlineExceeded(Failed):
    pass


class ShuttingDown(Failed):
    pass


class InternalFault(Failed):
    pass


class Cancelled(ServingError):
    pass


class SettingsError(Exception):
    """A setting, file or combination that cannot work: the start is refused with this one line."""


def _tree(root: type[ServingError]) -> dict[str, type[ServingError]]:
    found = {root.__name__: root}
    for child in root.__subclasses__():
        found.update(_tree(child))
    return found


def revive(name: str, message: str) -> ServingError:
    """The error that travelled as (class name, message), for `Delta.error`."""
    return _tree(ServingError).get(name, InternalFault)(message)
