"""Ray handles dressed as ports: the gateway's scheduler, the scheduler's verifier and drafter. Translates Ray's errors into
ours, bounds every call in time, and starts a dead worker anew.

Between a gateway and a scheduler of one machine requests and deltas do not pass through Ray (services/local_link.py), all else
does: what lives and what dies is Ray's.

Captured features never pass through the scheduler: `verify` has two results, and the second is handed on as a reference.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError, TaskCancelledError
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from scheduler.errors import DrafterLost, Failed, Overloaded, SchedulerLost, ServingError, SettingsError, VerifierLost
from scheduler.ports import ROWS_PER_REQUEST, Features
from scheduler.stats import SchedulerStats
from scheduler.wire import Delta, Draft, DraftAsk, DrafterInfo, Grammar, Plan, Request, Verdict, VerifierInfo
from services.local_link import Link
from services.model_card import ModelCard
from services.phase import told
from services.submissions import Submissions

logger = logging.getLogger(__name__)

_PHASE_LOOK_S = 0.5


def cause_of(error: BaseException) -> BaseException:
    """The exception raised on the other side, when it is one of ours; else the error itself."""
    cause = error.cause if isinstance(error, RayTaskError) else None
    return cause if isinstance(cause, ServingError | SettingsError) else error


def _scheduler_error(error: Exception) -> Exception:
    cause = cause_of(error)
    if isinstance(cause, ServingError):
        return cause
    if isinstance(error, BackPressureError):
        return Overloaded("the scheduler's queue is full")
    if isinstance(error, RayActorError | RayServeException | TaskCancelledError | GetTimeoutError):
        return SchedulerLost("the scheduler is not available")
    return error


def _apart(method: Any, *args: Any) -> Any:
    """Calls a handle outside the context of the HTTP request at hand. Serve cancels all calls made within it when its client
    goes, and ours must not end then: the subscription is every request's, a cancel is made because the client went, and a
    submit that is cut off half-way leaves a request that nobody cancels."""
    return contextvars.Context().run(method.remote, *args)


class RemoteScheduler:
    """services.gateway.engine.Scheduler over a Serve handle. The two configured handles are made once: each keeps its own
    routing state and metrics."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._unary = handle
        self._streaming = handle.options(stream=True)
        self._submissions = Submissions(self._submit_all, self._cancel_late)
        self._links: dict[str, Link] = {}
        self._may_link = True

    async def card(self) -> ModelCard:
        return await self._call_or_phase("card")

    async def submit(self, request: Request) -> None:
        """One with a grammar goes alone: the others need not wait until that is compiled."""
        if (link := self._links.get(request.subscriber)) is not None:
            await link.submit(request)
        elif request.params.grammar is None:
            await self._submissions.submit(request)
        else:
            await self._call("submit", request)

    async def _submit_all(self, requests: Sequence[Request]) -> Sequence[ServingError | None]:
        return await self._call("submit_all", requests)

    async def _cancel_late(self, request_id: str) -> None:
        try:
            await self.cancel(request_id)
        except Exception as error:
            logger.warning("a cancel did not reach the scheduler: %s", error, extra={"request_ids": (request_id,)})

    async def cancel(self, request_id: str) -> None:
        await self._call("cancel", request_id)

    async def queue_position(self, request_id: str) -> int | None:
        return await self._call("queue_position", request_id)

    async def snapshot(self) -> SchedulerStats:
        return await self._call("snapshot")

    async def check_health(self) -> None:
        await self._call_or_phase("check_health")

    async def subscribe(self, subscriber: str) -> AsyncGenerator[list[Delta], None]:
        """The scheduler's first item may be where its link is; then nothing more comes this way while the link stands."""
        here = ray.get_runtime_context()
        node_id = here.get_node_id() if self._may_link else ""
        response = _apart(self._streaming.subscribe, subscriber, here.current_actor, node_id)
        try:
            async for item in response:
                if isinstance(item, str):
                    async with contextlib.aclosing(self._linked(item, subscriber)) as lists:
                        async for deltas in lists:
                            yield deltas
                else:
                    yield item
        except Exception as error:
            raise _scheduler_error(error) from error
        finally:
            response.cancel()

    async def _linked(self, path: str, subscriber: str) -> AsyncGenerator[list[Delta], None]:
        """Where the machine is the same and its files are not, there is no next time."""
        try:
            link = self._links[subscriber] = await Link.connect(path, subscriber)
        except OSError as error:
            self._may_link = False
            logger.warning("no link to the scheduler of this machine, so it is called by Ray: %s", error)
            raise SchedulerLost("the scheduler cannot be reached this way") from error
        try:
            async for deltas in link.deltas():
                yield deltas
        finally:
            del self._links[subscriber]
            link.close()

    async def _call_or_phase(self, method: str) -> Any:
        """Serve lets a call wait while the replica starts; this says what it would wait for."""
        call: asyncio.Task[Any] | None = None
        try:
            while call is None or not call.done():
                if phase := await asyncio.to_thread(told, self._unary.app_name, self._unary.deployment_name):
                    raise SchedulerLost(phase)
                call = call or asyncio.create_task(self._call(method))
                await asyncio.wait({call}, timeout=_PHASE_LOOK_S)
            return call.result()
        finally:
            if call is not None:
                call.cancel()

    async def _call(self, method: str, *args: Any) -> Any:
        try:
            return await _apart(getattr(self._unary, method), *args)
        except Exception as error:
            raise _scheduler_error(error) from error


class WorkerProcess:
    """One Ray actor that is started anew when it died. `lost` is the error its callers see meanwhile."""

    def __init__(self, name: str, spawn: Callable[[], Any], lost: type[Failed], start_timeout_s: float) -> None:
        self._name, self._spawn, self._lost, self.start_timeout_s = name, spawn, lost, start_timeout_s
        self._actor: Any = None
        self._starting: asyncio.Task[Any] | None = None

    async def ensure(self) -> Any:
        """The living actor, loaded; started anew when there is none. A caller who gives up does not end the loading."""
        if self._actor is None:
            if self._starting is None or self._starting.done():
                self._starting = asyncio.create_task(self._start())
            await asyncio.shield(self._starting)
        return self._actor

    async def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Any:
        actor = self._alive()
        return await self._result(actor, getattr(actor, method).remote(*args), timeout_s)

    async def call_two(self, method: str, *args: Any) -> tuple[Any, Any]:
        """For a method with two results: the first, and a reference to the second."""
        actor = self._alive()
        first, second = getattr(actor, method).options(num_returns=2).remote(*args)
        return await self._result(actor, first, None), second

    async def ask(self, method: str, *args: Any) -> Any:
        """A call beside the work: who gives it up says nothing about the worker."""
        try:
            return await getattr(self._alive(), method).remote(*args)
        except RayError as error:
            if (cause := cause_of(error)) is not error:
                raise cause from None
            raise self._lost(f"the {self._name} failed: {_last_line(error)}") from error

    def stop(self) -> None:
        actor, self._actor = self._actor, None
        if self._starting is not None:
            self._starting.cancel()
        if actor is not None:
            ray.kill(actor)

    def _alive(self) -> Any:
        if self._actor is None:
            raise self._lost(f"the {self._name} is not running")
        return self._actor

    async def _start(self) -> None:
        actor = self._spawn()
        await self._result(actor, actor.start.remote(), self.start_timeout_s)
        self._actor = actor

    async def _result(self, actor: Any, reference: Any, timeout_s: float | None) -> Any:
        """The scheduler bounds its calls itself; one that it gives up is a worker that hangs."""
        try:
            return await asyncio.wait_for(reference, timeout_s)
        except TimeoutError:
            self._bury(actor)
            raise self._lost(f"the {self._name} did not answer within {timeout_s:g} s") from None
        except asyncio.CancelledError:
            self._bury(actor)
            raise
        except RayTaskError as error:
            if (cause := cause_of(error)) is not error:
                raise cause from None
            raise self._lost(f"the {self._name} failed: {_last_line(error)}") from error
        except RayError as error:
            self._bury(actor)
            raise self._lost(f"the {self._name}'s process died") from error

    def _bury(self, actor: Any) -> None:
        """A worker that does not answer is killed: the next one must not meet it on the same device."""
        logger.warning("the %s is lost", self._name)
        ray.kill(actor)
        if self._actor is actor:
            self._actor = None


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__


class RemoteVerifier:
    """scheduler.ports.Verifier over a Ray actor. `describe` brings a dead one back and answers when it is loaded."""

    def __init__(self, process: WorkerProcess) -> None:
        self._process = process

    async def describe(self) -> VerifierInfo:
        await self._process.ensure()
        return await self._process.call("describe")

    async def progress(self) -> int:
        return await self._process.call("progress")

    async def verify(self, plan: Plan) -> tuple[list[Verdict], Features | None]:
        verdicts, features = await self._process.call_two("verify", plan)
        return verdicts, features if plan.capture else None

    async def check_grammar(self, grammar: Grammar) -> None:
        await self._process.ask("check_grammar", grammar)

    async def measure(
        self, num_tokens: Sequence[int], context_lens: Sequence[int], rows_per_request: int = ROWS_PER_REQUEST
    ) -> list[list[float]]:
        return await self._process.call("measure", num_tokens, context_lens, rows_per_request)

    async def card(self, drafter: DrafterInfo | None) -> ModelCard:
        return await self._process.call("card", drafter)

    async def stop(self) -> None:
        self._process.stop()


class RemoteDrafter:
    """scheduler.ports.Drafter over a Ray actor. Features are references: Ray resolves them on the drafter's side."""

    def __init__(self, process: WorkerProcess) -> None:
        self._process = process

    async def describe(self) -> DrafterInfo:
        await self._process.ensure()
        return await self._process.call("describe")

    async def progress(self) -> int:
        return await self._process.call("progress")

    async def propose(self, asks: Sequence[DraftAsk], width: int, features: Sequence[Features]) -> list[Draft]:
        return await self._process.call("propose", list(asks), width, *features)

    async def measure(self, num_requests: Sequence[int], widths: Sequence[int]) -> list[list[float]]:
        return await self._process.call("measure", num_requests, widths)

    async def stop(self) -> None:
        self._process.stop()


def verifier_port(spawn: Callable[[], Any], start_timeout_s: float) -> RemoteVerifier:
    return RemoteVerifier(WorkerProcess("verifier", spawn, VerifierLost, start_timeout_s))


def drafter_port(spawn: Callable[[], Any], start_timeout_s: float) -> RemoteDrafter:
    return RemoteDrafter(WorkerProcess("drafter", spawn, DrafterLost, start_timeout_s))
