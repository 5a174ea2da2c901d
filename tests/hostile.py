"""Clients that send nonsense and clients that vanish, against a running server. In the suite in small numbers; by hand:

python -m tests.hostile fuzz --count 10000
python -m tests.hostile vanish --count 500
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx

from tests.fuzz_bodies import Hostile, hostile_bodies
from tests.integration.character_tokenizer import save_tokenizer
from tests.openai_schemas import check_answer, check_chunk, check_error
from tests.running_server import RunningServer, small_settings

GOLDEN = Path(__file__).parent / "data" / "golden"
_STATUS = re.compile(rb"HTTP/1\.1 ([2-5]\d\d) ")
DOCUMENTED = {400, 404, 413, 429}


@contextmanager
def small_server(folder: Path, *, max_model_len: int = 64, **sections: dict) -> Iterator[RunningServer]:
    target = save_tokenizer(Path(shutil.copytree(GOLDEN / "target", folder / "target")), 48)
    sections = {"model": {"max_model_len": max_model_len}, **sections}
    with RunningServer(small_settings(target, str(GOLDEN / "dspark_vanilla"), folder / "cache", **sections)) as server:
        yield server


def check(body: Hostile, response: httpx.Response) -> str:
    """The kind of answer; raises AssertionError for one that may not be."""
    where = f"{response.status_code} {response.text[:300]} to {body.path} {body.content[:600]!r}"
    if response.status_code != 200:
        expected = DOCUMENTED | ({504} if body.may_time_out else set())
        assert response.status_code in expected, where
        check_error(response.json())
        return str(response.status_code)
    if response.headers["content-type"].startswith("text/event-stream"):
        events = [part.removeprefix("data: ") for part in response.text.split("\n\n") if part.startswith("data: ")]
        assert events[-1] == "[DONE]" or (body.may_time_out and "deadline_exceeded" in events[-1]), where
        for event in events[:-1]:
            check_chunk(json.loads(event))
        return "stream"
    if body.path.startswith("/v1/"):
        check_answer(response.json())
    return "200"


async def fuzz(url: str, count: int, seed: int, concurrency: int = 8) -> Counter[str]:
    """Sends the bodies of a seed; the kinds of answers."""
    kinds: Counter[str] = Counter()
    bodies = hostile_bodies(count, seed)
    async with httpx.AsyncClient(base_url=url.removesuffix("/v1"), timeout=120) as client:

        async def send() -> None:
            for body in bodies:
                response = await client.post(body.path, content=body.content, headers=body.headers)
                kinds[check(body, response)] += 1

        await asyncio.gather(*(send() for _ in range(concurrency)))
    return kinds


async def odd_http(port: int, max_body_bytes: int) -> list[bytes]:
    """Requests that no library sends; the status lines that come back, b"" where the connection was closed without one."""
    body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 2}).encode()
    path = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
    whole = path + b"content-length: %d\r\n\r\n" % len(body) + body
    chunked = path + b"transfer-encoding: chunked\r\n\r\n"
    endless = b"".join(b"%x\r\n%s\r\n" % (65536, b" " * 65536) for _ in range(max_body_bytes // 65536 + 2))
    sent = [
        whole * 3,
        chunked + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body),
        chunked + b"".join(b"1\r\n%c\r\n" % each for each in body) + b"0\r\n\r\n",
        chunked + endless,
        chunked + b"zz\r\n",
        path + b"content-length: -1\r\n\r\n",
        path + b"content-length: 99999999999999999999\r\n\r\n" + body,
        path + b"content-length: 5\r\ncontent-length: 6\r\n\r\n" + body,
        path + b"expect: 100-continue\r\ncontent-length: %d\r\n\r\n" % len(body) + body,
        path + b"x-speculation: \xff\xfe\r\ncontent-length: %d\r\n\r\n" % len(body) + body,
        b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body,
        b"\x16\x03\x01 not http at all\r\n\r\n",
    ]
    return [line for each in sent for line in await _status_lines(port, each, 3 if each == whole * 3 else 1)]


async def _status_lines(port: int, sent: bytes, count: int) -> list[bytes]:
    """The first `count` final answers to what is sent down one connection, which then goes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answer = b""
    with suppress(ConnectionError, TimeoutError):
        writer.write(sent)
        async with asyncio.timeout(60):
            while len(_STATUS.findall(answer)) < count and (piece := await reader.read(65536)):
                answer += piece
    writer.transport.abort()
    return _STATUS.findall(answer)[:count] or [b""]


async def vanish(port: int, count: int, seed: int, at_once: int = 50) -> None:
    """Clients that connect, perhaps stream a little, and are gone without a word."""
    dice = random.Random(seed)
    for start in range(0, count, at_once):
        await asyncio.gather(*(_vanish_once(port, dice) for _ in range(min(at_once, count - start))))


async def _vanish_once(port: int, dice: random.Random) -> None:
    chat = dice.random() < 0.6
    body = {
        "model": "tiny",
        "max_tokens": 50,
        "ignore_eos": True,
        "stream": dice.random() < 0.6,
        "n": dice.choice((1, 1, 2)),
    }
    body |= {"messages": [{"role": "user", "content": "hello"}]} if chat else {"prompt": ["abc", "hello"]}
    content = json.dumps(body).encode()
    path = "/v1/chat/completions" if chat else "/v1/completions"
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n\r\n".encode()
    whole = head + content
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(whole if dice.random() < 0.85 else whole[: dice.randrange(1, len(whole))])
    await writer.drain()
    if dice.random() < 0.5:
        with suppress(TimeoutError):
            await asyncio.wait_for(reader.read(dice.choice((1, 200, 900))), dice.choice((0.01, 0.1, 0.5)))
    else:
        await asyncio.sleep(dice.choice((0.0, 0.001, 0.02)))
    writer.transport.abort()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.hostile", description=__doc__)
    parser.add_argument("what", choices=("fuzz", "vanish"))
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, small_server(Path(folder)) as server:
        before = server.ask(server.books())
        if args.what == "fuzz":
            print(dict(asyncio.run(fuzz(server.url, args.count, args.seed))))
        else:
            asyncio.run(vanish(server.port, args.count, args.seed))
        after = server.quiet_within(before, 1.0)
        print(f"before {before}\nafter  {after}")
        assert {**after, "tasks": 0} == {**before, "tasks": 0} and after["tasks"] <= before["tasks"] + 2


if __name__ == "__main__":
    main()
