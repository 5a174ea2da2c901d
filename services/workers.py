"""Makes the workers of an engine group, and the card of the model they serve. The only module of `services` that brings
torch into a process: import it where something computes, nowhere else.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from drafter.actor import DrafterWorker
from drafter.checkpoint import read_layer_ids
from scheduler.errors import SettingsError
from scheduler.wire import DrafterInfo, VerifierInfo
from services.engine import NO_DRAFTER, Workers
from services.model_card import ModelCard, read_card
from services.settings import Settings
from verifier.actor import VerifierWorker
from verifier.weights import resolve_model


async def launch_colocated(settings: Settings, *, calibrated: bool = True) -> Workers:
    """Both workers in this process on one computing thread: two OpenMP teams on the same cores get in each other's way,
    with single steps ten times as long."""
    executor = ThreadPoolExecutor(1, thread_name_prefix="compute")
    verifier = await start_verifier(settings, executor)
    info = await verifier.describe()
    drafter = await start_drafter(settings, info, executor, calibrated=calibrated)
    card = await model_card(settings, info, await drafter.describe() if drafter is not None else None)

    async def stop() -> None:
        if drafter is not None:
            await drafter.stop()
        await verifier.stop()
        executor.shutdown(wait=False, cancel_futures=True)

    return Workers(verifier, drafter, card, stop)


async def start_verifier(settings: Settings, executor: ThreadPoolExecutor | None = None) -> VerifierWorker:
    layer_ids = await asyncio.to_thread(read_layer_ids, settings.drafter_checkpoint(), settings.cache_dir)
    worker = VerifierWorker(settings.verifier_config(layer_ids), executor)
    await worker.start()
    return worker


async def start_drafter(
    settings: Settings, verifier: VerifierInfo, executor: ThreadPoolExecutor | None = None, *, calibrated: bool = True
) -> DrafterWorker | None:
    if settings.drafter_checkpoint() == NO_DRAFTER:
        return None
    config = dataclasses.replace(settings.drafter_config(verifier.num_blocks), calibrated=calibrated)
    worker = DrafterWorker(config, executor)
    await worker.start()
    return worker


async def model_card(settings: Settings, verifier: VerifierInfo, drafter: DrafterInfo | None) -> ModelCard:
    return await asyncio.to_thread(_read_model_card, settings, verifier, drafter)


def _read_model_card(settings: Settings, verifier: VerifierInfo, drafter: DrafterInfo | None) -> ModelCard:
    return read_card(
        resolve_model(settings.target_path(), settings.cache_dir),
        name=settings.model_name,
        created=int(time.time()),
        max_model_len=verifier.max_model_len,
        draft_width=drafter.width if drafter is not None else 0,
        chat_template=_template_file(settings.model.chat_template),
    )


def _template_file(path: str) -> str:
    if not path:
        return ""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise SettingsError(f"model.chat_template: {path}: {error.strerror or error}") from None
