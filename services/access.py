"""Who may reach the server, as settings say it: API keys, their limits, the access log, and whether it may listen in public.

Reads the key file; keys leave here as digests. No message ever shows a key.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_validator

from scheduler.errors import SettingsError
from services.gateway.access_log import AccessLogConfig
from services.gateway.auth import ApiKey, AuthConfig, KeyScope, digest_of
from services.gateway.limits import Limits

_SHORTEST_KEY = 16
_MOST = 2**31 - 1
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class KeySettings(_Part):
    """key: the key itself, of 16 characters or more, or `sha256:` and its digest in hex. scopes: `api` (everything but
    /metrics) and `metrics`. The limits are the key's own; null takes those of gateway.limits, 0 is none."""

    key: SecretStr
    scopes: tuple[KeyScope, ...] = ("api",)
    enabled: bool = True
    requests_per_minute: int | None = Field(default=None, ge=0, le=_MOST)
    max_live: int | None = Field(default=None, ge=0, le=_MOST)

    @field_validator("key")
    @classmethod
    def _a_secret(cls, key: SecretStr) -> SecretStr:
        secret = key.get_secret_value()
        if not _DIGEST.fullmatch(secret) and (len(secret) < _SHORTEST_KEY or not secret.isascii() or " " in secret):
            raise ValueError(
                f"must be {_SHORTEST_KEY} or more ASCII characters without spaces, or sha256: and 64 hex digits"
            )
        return key

    @property
    def digest(self) -> bytes:
        secret = self.key.get_secret_value()
        found = _DIGEST.fullmatch(secret)
        return bytes.fromhex(found.group(1)) if found else digest_of(secret)


class AuthSettings(_Part):
    """keys: name -> key, or name -> what KeySettings has. keys_file: a YAML file of the same form; both together count.
    metrics_need_key: /metrics needs a key of the scope `metrics`."""

    keys: dict[str, Any] = {}
    keys_file: str = ""
    metrics_need_key: bool = False

    @field_validator("keys")
    @classmethod
    def _read(cls, keys: dict[str, Any]) -> dict[str, KeySettings]:
        return {str(name): _key(str(name), value) for name, value in keys.items()}


class LimitSettings(_Part):
    """Of each key at each gateway replica; without keys, of all requests together. requests_per_minute: begun within any 60
    seconds. max_live: at a time. 0 is no limit."""

    requests_per_minute: int = Field(default=0, ge=0, le=_MOST)
    max_live: int = Field(default=0, ge=0, le=_MOST)

    def limits(self, key: KeySettings | None = None) -> Limits:
        own = (key.requests_per_minute, key.max_live) if key is not None else (None, None)
        rate, live = own
        return Limits(
            self.requests_per_minute if rate is None else rate,
            self.max_live if live is None else live,
        )


class AccessLogSettings(_Part):
    """to: `off`, `stderr`, `stdout` or a file. prompts: write prompts into it too; it never has answers or keys."""

    to: str = "stderr"
    prompts: bool = False

    @field_validator("to", mode="before")
    @classmethod
    def _yaml_off(cls, value: Any) -> Any:
        return "off" if value is False else value

    def config(self) -> AccessLogConfig:
        return AccessLogConfig(**self.model_dump())


def auth_config(auth: AuthSettings, limits: LimitSettings) -> AuthConfig:
    """Raises SettingsError when the key file cannot be used or two keys have a name or a secret in common."""
    keys: dict[str, KeySettings] = dict(auth.keys)
    for name, key in (_read_keys(Path(auth.keys_file)) if auth.keys_file else {}).items():
        if name in keys:
            raise SettingsError(f"gateway.auth: the key {name!r} is both in keys and in keys_file; remove one")
        keys[name] = key
    names: dict[bytes, str] = {}
    for name, key in keys.items():
        if key.digest in names:
            raise SettingsError(f"gateway.auth: {names[key.digest]!r} and {name!r} are the same key; give each its own")
        names[key.digest] = name
    found = tuple(
        ApiKey(name, key.digest, frozenset(key.scopes), key.enabled, limits.limits(key)) for name, key in keys.items()
    )
    return AuthConfig(found, auth.metrics_need_key)


def _read_keys(path: Path) -> dict[str, KeySettings]:
    where = f"gateway.auth.keys_file: {path}"
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{where}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError):
        raise SettingsError(f"{where}: not valid YAML; a line is 'name: key'") from None
    if not isinstance(loaded, Mapping) or not loaded:
        raise SettingsError(f"{where}: must be a mapping of names to keys, one line 'name: key' for each")
    try:
        return {str(name): _key(str(name), value) for name, value in loaded.items()}
    except ValueError as error:
        raise SettingsError(f"{where}: {error}") from None


def _key(name: str, value: Any) -> KeySettings:
    """Raises ValueError with the name, and without the value."""
    if not _NAME.fullmatch(name):
        raise ValueError(f"the name {name[:64]!r} must be 1 to 64 letters, digits or any of ._-")
    if isinstance(value, KeySettings):
        return value
    try:
        return KeySettings.model_validate({"key": value} if isinstance(value, str) else value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        said = first["msg"].removeprefix("Value error, ")
        raise ValueError(f"{name}{'.' + field if field else ''}: {said}") from None


def check_exposure(host: str, auth: AuthConfig, *, allowed: bool) -> None:
    """Raises SettingsError when everybody who can reach `host` could use the server."""
    if allowed or any("api" in key.scopes and key.enabled for key in auth.keys) or _is_loopback(host):
        return
    raise SettingsError(
        f"gateway.host: {host} can be reached from other machines and there are no API keys; set gateway.auth.keys or "
        "gateway.auth.keys_file, or gateway.allow_public_without_keys=true, or listen on 127.0.0.1"
    )


def _is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host or None, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError:
        # A host that has no address is refused where it is listened on.
        return True
    return all(ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback for *_, address in found)
