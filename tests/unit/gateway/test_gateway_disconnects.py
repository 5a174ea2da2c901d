"""Clients that go: the engine hears of it exactly once, whenever it happens, and nothing is kept."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time

import httpx
import pytest
import uvicorn

from services.gateway.app import create_app
from services.gateway.config import GatewayConfig
from tests.virtual_time import virtual_time
from tests.waiting import until

CHAT = "/v1/chat/completions"


class Server:
    """The app under a real uvicorn on a free loopback port."""

    def __init__(self, app) -> None:
        self._app = app
        self.socket = socket.socket()
        self.socket.bind(("127.0.0.1", 0))
        self.port = self.socket.getsockname()[1]
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="on"))

    async def __aenter__(self) -> Server:
        self._task = asyncio.create_task(self._server.serve(sockets=[self.socket]))
        await self._app.state.gateway.loaded.wait()
        await until(lambda: self._server.started)
        return self

    async def __aexit__(self, *_) -> None:
        self._server.should_exit = True
        await self._task
        self.socket.close()


async def drop(port: int, request: dict, bytes_to_read: int, pause_s: float) -> None:
    """Sends a request, perhaps reads some of the answer, and closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps(request).encode()
    head = (
        f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
    )
    writer.write(head.encode() + content)
    await writer.drain()
    if bytes_to_read:
        await reader.readexactly(bytes_to_read)
    await asyncio.sleep(pause_s)
    writer.close()


async def test_200_clients_that_connect_and_drop_cause_exactly_one_cancel_each(bench, make_script, body):
    script = make_script(bench.rounds("Hello there " * 20, eos=False), step_s=0.01, hang=True)
    scheduler = bench.scheduler(script)
    app = create_app(scheduler, bench.config)
    client = app.state.gateway.client
    async with Server(app) as server:
        for _ in range(4):
            await asyncio.gather(
                *(
                    drop(
                        server.port,
                        body(stream=number % 2 == 0),
                        bytes_to_read=200 if number % 4 == 0 else 0,
                        pause_s=0.001 * (number % 10),
                    )
                    for number in range(50)
                )
            )
        await until(lambda: client.num_live == 0 and not client.num_background)
        await asyncio.sleep(0.05)
        ids = {request.request_id for request in scheduler.requests}
        assert set(scheduler.cancels) == ids and set(scheduler.cancels.values()) <= {1}
        assert len(ids) >= 150
        assert len(asyncio.all_tasks()) < 20
        async with httpx.AsyncClient() as http:
            text = (await http.get(f"http://127.0.0.1:{server.port}/metrics")).text
        assert f'dspark_requests_total{{model="tiny-chat",outcome="cancelled",status="499"}} {len(ids)}.0' in text
        assert "dspark_gateway_open_requests" in text


async def test_a_client_that_sends_its_body_a_byte_at_a_time_is_refused_in_time_and_cut_off(bench, make_script):
    config = GatewayConfig(stalled_s=0.3)
    scheduler = bench.scheduler(make_script(bench.rounds("Hi")))
    async with Server(create_app(scheduler, config)) as server:
        for head, dropped in (("content-length: 100000", b" "), ("transfer-encoding: chunked", b"1\r\n \r\n")):
            reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
            writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{head}\r\n\r\n".encode())

            async def drip(writer=writer, dropped=dropped) -> None:
                with contextlib.suppress(ConnectionError):
                    while not writer.is_closing():
                        writer.write(dropped)
                        await writer.drain()
                        await asyncio.sleep(0.05)

            dripping = asyncio.create_task(drip())
            answer = b""
            # a byte that arrives after the server has closed makes the end a reset
            with contextlib.suppress(ConnectionResetError):
                async with asyncio.timeout(60):
                    while piece := await reader.read(65536):
                        answer += piece
            dripping.cancel()
            await asyncio.wait({dripping})
            writer.close()
            answer, _, text = answer.partition(b"\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 408 ") and b"connection: close" in answer.lower()
            assert json.loads(text)["error"]["message"] == "the request body did not arrive within 0.3 s"
        assert not scheduler.requests


async def test_a_client_that_takes_nothing_of_its_stream_is_given_up_and_its_request_cancelled_once(
    bench, make_script, body
):
    """Its answer is larger than all buffers on the way."""
    config = GatewayConfig(stalled_s=0.3)
    long = bench.rounds("Hello there " * 4_000, eos=False)
    scheduler = bench.scheduler(make_script(long, hang=True))
    app = create_app(scheduler, config)
    server = Server(app)
    server.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    async with server:
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.setblocking(False)
        await asyncio.get_running_loop().sock_connect(plain, ("127.0.0.1", server.port))
        _, writer = await asyncio.open_connection(sock=plain, limit=64)
        content = json.dumps(body(stream=True)).encode()
        writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode() + content)
        await until(lambda: scheduler.requests)
        client = app.state.gateway.client
        await until(lambda: client.num_live == 0 and not client.num_background)
        async with httpx.AsyncClient() as http:
            text = (await http.get(f"http://127.0.0.1:{server.port}/metrics")).text
        assert 'dspark_requests_total{model="tiny-chat",outcome="cancelled",status="499"} 1.0' in text
        assert set(scheduler.cancels.values()) == {1}
        writer.transport.abort()


async def test_a_request_that_was_answered_is_never_cancelled(bench, make_script, body):
    async with bench.serve(make_script(bench.rounds("Hello there"))) as (client, scheduler):
        for stream in (True, False) * 10:
            await client.post(CHAT, json=body(stream=stream))
    assert len(scheduler.requests) == 20 and not scheduler.cancels


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_while_its_request_is_being_submitted_is_cancelled_after_it(
    bench, make_script, body, stream
):
    scheduler = bench.scheduler(make_script(bench.rounds("Hi", eos=False), hang=True))
    order: list[str] = []
    submit, cancel = scheduler.submit, scheduler.cancel

    async def slow_submit(request):
        await asyncio.sleep(0.1)
        await submit(request)
        order.append("submit")

    async def noted_cancel(request_id):
        order.append("cancel")
        await cancel(request_id)

    scheduler.submit, scheduler.cancel = slow_submit, noted_cancel
    async with Server(create_app(scheduler, bench.config)) as server:
        await drop(server.port, body(stream=stream), bytes_to_read=0, pause_s=0.02)
        await until(lambda: len(order) == 2)
    assert order == ["submit", "cancel"]


async def test_the_handler_that_is_cancelled_from_outside_cancels_the_request(bench, make_script, body):
    """Ray Serve ends the handler's task itself when the client has gone."""
    async with bench.serve(make_script(bench.rounds("Hi", eos=False), hang=True)) as (client, scheduler):
        task = asyncio.create_task(client.post(CHAT, json=body()))
        await until(lambda: scheduler.requests)
        task.cancel()
        await asyncio.wait({task})
        await until(lambda: sum(scheduler.cancels.values()) == 1)


async def test_an_idle_subscription_is_closed_and_comes_back_by_itself(bench, make_script, body):
    config = GatewayConfig(idle_s=0.05)
    async with bench.serve(make_script(bench.rounds("Hi")), config) as (client, scheduler):
        await client.post(CHAT, json=body())
        assert scheduler.num_subscriptions == 1
        await until(lambda: not scheduler.queues)
        assert (await client.post(CHAT, json=body())).status_code == 200
        assert scheduler.num_subscriptions == 2


async def test_a_subscription_is_not_idle_while_a_request_is_silent(bench, make_script, body):
    config = GatewayConfig(idle_s=0.05)
    async with bench.serve(make_script(bench.rounds("Hi"), step_s=0.2), config) as (client, scheduler):
        assert (await client.post(CHAT, json=body())).status_code == 200
        assert scheduler.num_subscriptions == 1


async def test_a_new_scheduler_is_found_without_disturbing_answers_of_the_old_one(bench, make_script, body):
    slow = make_script(bench.rounds("from the old"), step_s=0.03)
    async with bench.serve(slow) as (client, scheduler):
        old = asyncio.create_task(client.post(CHAT, json=body()))
        await until(lambda: scheduler.requests)
        draining = dict(scheduler.queues)
        scheduler.queues.clear()  # the replaced scheduler's subscribers are unknown to the new one
        scheduler.answer = lambda request: make_script(bench.rounds("from the new"))
        new = await client.post(CHAT, json=body())
        assert new.json()["choices"][0]["message"]["content"] == "from the new"
        scheduler.queues.update(draining)
        assert (await old).json()["choices"][0]["message"]["content"] == "from the old"


@pytest.mark.parametrize("silent", ["submit", "subscribe"])
async def test_a_scheduler_that_never_answers_ends_in_503_after_one_wait(bench, make_script, body, silent, monkeypatch):
    config = GatewayConfig(connect_timeout_s=5.0, call_timeout_s=5.0)
    async with bench.serve(make_script(bench.rounds("Hi")), config) as (client, scheduler):
        virtual_time(monkeypatch)
        waited = []

        async def stuck(request):
            waited.append(request)
            await asyncio.sleep(60)

        async def stuck_stream(subscriber):
            await stuck(subscriber)
            yield []

        setattr(scheduler, silent, stuck if silent == "submit" else stuck_stream)
        began_s = time.monotonic()
        response = await client.post(CHAT, json=body())
        assert time.monotonic() - began_s == pytest.approx(5.0, abs=0.1)
    assert response.status_code == 503 and response.json()["error"]["code"] == "engine_unavailable"
    assert response.headers["retry-after"] == "5" and len(waited) == 1
