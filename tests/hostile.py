"""Clients that send nonsense and clients that vanish, against a running server. In the suite in small numbers; by hand:

python -m tests.hostile fuzz --count 10000
python -m tests.hostile vanish --count 500
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
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
    async with httpx.AsyncClient(base_url=url.removesuffix("/v1"), timeout=60) as client:

        async def send() -> None:
            for body in bodies:
                response = await client.post(body.path, content=body.content, headers=body.headers)
                kinds[check(body, response)] += 1

        await asyncio.gather(*(send() for _ in range(concurrency)))
    return kinds


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
