"""`dspark doctor`: runs the checks and prints one line for each. Exit status 1 when one of them failed."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial

from scheduler.errors import SettingsError
from services.doctor import machine
from services.doctor.findings import Finding, as_json, as_lines, found, status_of, summary
from services.settings import Settings


def add_doctor(command: argparse.ArgumentParser, settings_of: Callable[[argparse.Namespace], Settings]) -> None:
    command.add_argument("--url", metavar="URL", help="check a running server instead of this machine")
    command.add_argument("--key", default="", help="API key of that server")
    command.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    command.set_defaults(run=lambda args: run(args, settings_of))


def run(args: argparse.Namespace, settings_of: Callable[[argparse.Namespace], Settings]) -> int:
    if args.url is not None and not args.url.strip():
        raise SettingsError("--url is empty; give the server's address, or leave it away to check this machine")
    findings = []
    checks = check_server(args.url, args.key) if args.url else check_machine(lambda: settings_of(args))
    for finding in checks:
        findings.append(finding)
        if not args.json:
            print(*as_lines([finding]), flush=True)
    print(as_json(findings) if args.json else summary(findings))
    return status_of(findings)


def check_server(url: str, key: str) -> Iterator[Finding]:
    from services.doctor.deployment import check_deployment

    return check_deployment(url, key)


def check_machine(load: Callable[[], Settings]) -> Iterator[Finding]:
    """What does not depend on the settings comes also where these are wrong."""
    loaded: list[Settings] = []

    def check_settings() -> Finding:
        loaded.append(_placed(load()))
        return Finding("settings", "ok", f"valid: {loaded[0].model_name}, placement {loaded[0].placement}")

    yield found("settings", check_settings)
    yield found("versions", machine.check_versions)
    yield found("ray", machine.check_ray)
    yield found("shm", machine.check_shared_memory)
    yield found("compiler", machine.check_compiler)
    for settings in loaded:
        yield from _of_settings(settings)


def _placed(settings: Settings) -> Settings:
    """`auto` as a start on this machine would resolve it."""
    if settings.placement != "auto":
        return settings
    import torch

    placement = "split" if torch.cuda.device_count() >= 2 else "colocated"
    return settings.model_copy(update={"placement": placement})


def _of_settings(settings: Settings) -> Iterator[Finding]:
    for name in ("devices", "instructions", "threads", "port", "access", "cache", "tracing"):
        yield found(name, partial(getattr(machine, f"check_{name}"), settings))
    from services.doctor import models

    both = models.Models(settings)
    for name in ("model", "drafter", "calibration", "memory", "curve"):
        yield found(name, partial(getattr(models, f"check_{name}"), both))
