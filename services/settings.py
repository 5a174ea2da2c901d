"""The only reader of the environment and of the settings file: one tree, validated once, frozen afterwards.

Order, later wins: defaults, YAML file (or a Serve application's `args`), environment (`DSPARK_GATEWAY__PORT=9000`),
command-line flags. Unknown keys are refused at every level, and each refusal is one line that names the key and where
it came from. Builds the frozen settings of the other packages.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import itertools
import json
import os
import re
import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, EnvSettingsSource, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict
from pydantic_settings.exceptions import SettingsError as EnvParseError

from drafter.config import DrafterConfig
from scheduler.admit import parse_planner
from scheduler.config import SchedulerConfig
from scheduler.errors import SettingsError
from services.access import AccessLogSettings, AuthSettings, LimitSettings, auth_config
from services.demo import demo_drafter, demo_target
from services.gateway.config import GatewayConfig
from services.gateway.request_trace import TracingConfig
from services.gateway.speculation import RULES, SpeculationPolicy
from services.logs import LogConfig
from services.settings_file import read_file
from verifier.config import VerifierConfig

PREFIX, DELIMITER = "DSPARK_", "__"
_OTEL_PREFIX = "OTEL_EXPORTER_OTLP_"
FILE_VARIABLE = "DSPARK_SETTINGS"
DEMO = "demo"
_BRIEF = reprlib.Repr()
_BRIEF.maxlevel = 2
_BRIEF.maxstring = _BRIEF.maxother = 200
DEMO_NAME = "smollm2-135m-instruct"

# What Kubernetes puts into every pod beside a Service whose name begins with "dspark".
_SERVICE_LINK = re.compile(r"DSPARK_(\w+_)?(SERVICE_(HOST|PORT)|PORT)(_\w+)?")

# What fits the integers of block tables, more processes than any cluster has, and what a timer can wait (30 years).
_MOST, _MOST_COPIES, _LONGEST_S = 2**31 - 1, 1000, 1e9
# Control characters, line ends and lone surrogates.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSettings(_Section):
    """The target. path: `demo`, a Hugging Face folder, a hub id or a GGUF file. name: as clients call it; empty is
    derived from the path. max_model_len 0 is the model's own limit. chat_template: a file instead of the model's.
    """

    path: str = DEMO
    name: str = ""
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    device: str = "auto"
    max_model_len: int = Field(default=0, ge=0, le=_MOST)
    chat_template: str = ""


class DrafterSettings(_Section):
    """checkpoint: a folder, `ngram`, `none`, or `auto`: the drafter that ships with the demo model, else `ngram`.
    candidates: size of the sparse proposal; 0 is the whole vocabulary. max_width 0 is the checkpoint's own γ."""

    checkpoint: str = "auto"
    candidates: int = Field(default=64, ge=0, le=_MOST)
    max_width: int = Field(default=0, ge=0, le=_MOST)
    dtype: Literal["auto", "bfloat16", "float32", "float64"] = "auto"
    device: str = "auto"


class SchedulerSettings(_Section):
    """See scheduler.config.SchedulerConfig."""

    planner: str = "auto"
    max_live: int = Field(default=64, ge=1, le=_MOST)
    max_waiting: int = Field(default=256, ge=0, le=_MOST)
    prefill_chunk: int = Field(default=256, ge=1, le=_MOST)
    longest_step_s: float = Field(default=0.0, ge=0, le=_LONGEST_S)
    pipeline_depth: int = Field(default=2, ge=1, le=2)
    prefix_cache: bool = True
    priority_aging_s: float = Field(default=30.0, ge=0, le=1e6)
    max_wait_s: float = Field(default=0.0, ge=0, le=_LONGEST_S)
    default_timeout_s: float = Field(default=600.0, ge=0, le=_LONGEST_S)
    check_integrity: bool = False
    worker_timeout_s: float = Field(default=60.0, ge=1, le=_LONGEST_S)
    recover_timeout_s: float = Field(default=120.0, ge=0, le=_LONGEST_S)
    stall_timeout_s: float = Field(default=300.0, ge=1, le=_LONGEST_S)

    @field_validator("planner", mode="before")
    @classmethod
    def _yaml_off(cls, value: Any) -> Any:
        return yaml_off(value)

    @field_validator("planner")
    @classmethod
    def _known_planner(cls, planner: str) -> str:
        try:
            parse_planner(planner)
        except SettingsError as error:
            raise ValueError(str(error).removeprefix("scheduler.planner ")) from None
        return planner


class KvSettings(_Section):
    """block_size: tokens of a block. num_blocks: blocks; 0: as many as cache_bytes holds.

    cache_bytes: memory of the target's KV cache on its device; 0: room for the context length, but at most 1,024 tokens, for
    each of scheduler.max_live requests, and for one whole context at least.
    """

    block_size: int = Field(default=16, ge=1, le=_MOST)
    num_blocks: int = Field(default=0, ge=0, le=_MOST)
    cache_bytes: int = Field(default=0, ge=0, le=2**60)


class ResourceSettings(_Section):
    """What Ray reserves. GPUs may be fractions; null is 1 for each worker where the cluster has GPUs, else 0. In the
    `colocated` placement the one process that computes gets `verifier_gpus`.

    start_timeout_s: how long a worker's process may take to load.
    """

    verifier_gpus: float | None = Field(default=None, ge=0, le=_MOST_COPIES)
    drafter_gpus: float | None = Field(default=None, ge=0, le=_MOST_COPIES)
    verifier_cpus: float = Field(default=0.5, ge=0, le=_MOST_COPIES)
    drafter_cpus: float = Field(default=0.5, ge=0, le=_MOST_COPIES)
    scheduler_cpus: float = Field(default=0.25, ge=0, le=_MOST_COPIES)
    gateway_cpus: float = Field(default=0.25, ge=0, le=_MOST_COPIES)
    start_timeout_s: float = Field(default=1800.0, gt=0, le=_LONGEST_S)

    @field_validator("verifier_gpus", "drafter_gpus")
    @classmethod
    def _of_one_or_whole(cls, gpus: float | None) -> float | None:
        if gpus is not None and gpus > 1 and gpus != int(gpus):
            raise ValueError("above 1 Ray takes whole devices only; use a fraction of one, or a whole number")
        return gpus


class SpeculationSettings(_Section):
    """What requests may say about their own drafts. modes: rules they may choose, of auto, algorithm1, fixed, threshold and
    off; an empty list lets scheduler.planner hold for all. max_draft_tokens: the most they may ask for; 0 is no bound."""

    modes: Annotated[tuple[str, ...], NoDecode] = RULES
    max_draft_tokens: int = Field(default=0, ge=0, le=_MOST)

    @field_validator("modes", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        parts = listed(yaml_off(value))
        return [yaml_off(part) for part in parts] if isinstance(parts, list) else parts

    @field_validator("modes")
    @classmethod
    def _known(cls, modes: tuple[str, ...]) -> tuple[str, ...]:
        for mode in modes:
            if mode not in RULES:
                raise ValueError(f"{mode!r} is none of {', '.join(RULES)}")
        return modes


class GatewaySettings(_Section):
    """served_names: further names of the model for clients, beside model.name (a list, or names separated by commas).

    allow_public_without_keys: listen on an address that is not loopback though everybody who reaches it may use the server.

    max_ongoing_requests: of one replica; Serve queues what is above, so it lies above what the engine admits, which
    answers 429 itself. drain_s: how long a replica that stops may finish its streams. The rest: GatewayConfig."""

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    replicas: int = Field(default=1, ge=1, le=_MOST_COPIES)
    max_ongoing_requests: int = Field(default=1024, ge=1, le=_MOST)
    drain_s: float = Field(default=120.0, ge=0, le=1e6)
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024, le=2**40)
    stalled_s: float = Field(default=60.0, gt=0, le=_LONGEST_S)
    keepalive_s: float = Field(default=10.0, gt=0, le=_LONGEST_S)
    connect_timeout_s: float = Field(default=30.0, gt=0, le=_LONGEST_S)
    call_timeout_s: float = Field(default=5.0, gt=0, le=_LONGEST_S)
    idle_s: float = Field(default=10.0, gt=0, le=_LONGEST_S)
    speculation_metrics: Literal["off", "summary", "detailed"] = "summary"
    speculation: SpeculationSettings = SpeculationSettings()
    served_names: Annotated[tuple[str, ...], NoDecode] = ()
    max_choices: int = Field(default=64, ge=1, le=_MOST)
    max_timeout_s: float = Field(default=3600.0, ge=0, le=_LONGEST_S)
    tool_format: Literal["auto", "hermes", "llama3_json", "qwen3_coder", "pythonic", "mistral", "mistral_args"] = "auto"
    reasoning: Literal["auto", "think", "off"] = "auto"
    auth: AuthSettings = AuthSettings()
    limits: LimitSettings = LimitSettings()
    access_log: AccessLogSettings = AccessLogSettings()
    allow_public_without_keys: bool = False

    @field_validator("speculation_metrics", "reasoning", mode="before")
    @classmethod
    def _yaml_off(cls, value: Any) -> Any:
        return yaml_off(value)

    @field_validator("served_names", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return listed(value)

    @field_validator("served_names")
    @classmethod
    def _named(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if not all(name.strip() for name in names):
            raise ValueError("a name must not be empty")
        return names


class LogSettings(_Section):
    """Lines of every process. engine: what this engine group is called in them; empty is made of its settings, so that it stays
    the same when it restarts."""

    format: Literal["text", "json"] = "text"
    level: Literal["debug", "info", "warning", "error"] = "info"
    engine: str = Field(default="", max_length=64, pattern="^[A-Za-z0-9._-]*$")


class TracingSettings(_Section):
    """endpoint: an OTLP receiver (`http://collector:4318`, or with grpc `http://collector:4317`); empty is no tracing, and
    OTEL_EXPORTER_OTLP_ENDPOINT stands in where it is not given. protocol: likewise OTEL_EXPORTER_OTLP_PROTOCOL.
    ratio: of the traces that begin here, 0 to 1; where a client sends `traceparent`, its decision holds."""

    endpoint: str = Field(default="", pattern="^(https?://.+)?$")
    protocol: Literal["http/protobuf", "grpc"] = "http/protobuf"
    ratio: float = Field(default=1.0, ge=0, le=1)

    @field_validator("endpoint")
    @classmethod
    def _leads_somewhere(cls, endpoint: str) -> str:
        if endpoint:
            try:
                address = urlsplit(endpoint)
                named = bool(address.hostname) and address.port != 0
            except ValueError as error:
                raise ValueError(f"{error}; use http://HOST:PORT or https://HOST:PORT") from None
            if not named:
                raise ValueError("no host or port is named; use http://HOST:PORT or https://HOST:PORT")
        return endpoint


class Settings(BaseSettings):
    """groups: engine groups behind the gateway, each a scheduler with its own target and drafter of the same model and its own
    devices. threads: of each process that computes; 0 is one per usable core. cache_dir: converted weights and cost curves;
    empty is ~/.cache/dspark. seed: makes the draws of requests that bring no seed repeatable (tests)."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True)

    model: ModelSettings = ModelSettings()
    drafter: DrafterSettings = DrafterSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    kv: KvSettings = KvSettings()
    groups: int = Field(default=1, ge=1, le=_MOST_COPIES)
    placement: Literal["auto", "split", "colocated"] = "auto"
    resources: ResourceSettings = ResourceSettings()
    gateway: GatewaySettings = GatewaySettings()
    tracing: TracingSettings = TracingSettings()
    log: LogSettings = LogSettings()
    threads: int = Field(default=0, ge=0, le=4096)
    cache_dir: str = ""
    seed: int | None = None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is passed in: `load_settings` merges the sources, so that each value's origin is known."""
        return (init_settings,)

    @property
    def model_name(self) -> str:
        if self.model.name:
            return self.model.name
        if self.model.path == DEMO:
            return DEMO_NAME
        path = Path(self.model.path)
        return path.stem if path.suffix.lower() == ".gguf" else path.name

    @property
    def cache_path(self) -> Path:
        return Path(os.path.expanduser(self.cache_dir or "~/.cache/dspark"))

    def target_path(self) -> str:
        return str(demo_target()) if self.model.path == DEMO else self.model.path

    def drafter_checkpoint(self) -> str:
        if self.drafter.checkpoint != "auto":
            return self.drafter.checkpoint
        shipped = demo_drafter() if self.model.path == DEMO else None
        return str(shipped) if shipped is not None else "ngram"

    def scheduler_config(self) -> SchedulerConfig:
        values = self.scheduler.model_dump()
        if self.placement != "split":
            values["pipeline_depth"] = 1  # one device has nothing to do at the same time
        return SchedulerConfig(**values)

    def gateway_config(self) -> GatewayConfig:
        names = GatewayConfig.__dataclass_fields__
        values = {key: value for key, value in self.gateway.model_dump().items() if key in names}
        gateway = self.gateway
        return GatewayConfig(
            **values
            | {
                "speculation": SpeculationPolicy(**gateway.speculation.model_dump()),
                "auth": auth_config(gateway.auth, gateway.limits),
                "anonymous_limits": gateway.limits.limits(),
                "access_log": gateway.access_log.config(),
                "tracing": TracingConfig(**self.tracing.model_dump()),
                "log": self.log_config(),
            }
        )

    def log_config(self) -> LogConfig:
        return LogConfig(self.log.format, self.log.level, self.log.engine or self._engine_name())

    def _engine_name(self) -> str:
        said = self.model_dump_json(include={"model", "drafter", "scheduler", "kv", "placement"})
        return f"engine-{hashlib.sha256(said.encode()).hexdigest()[:8]}"

    def verifier_config(self, capture_layers: tuple[int, ...]) -> VerifierConfig:
        return VerifierConfig(
            model=self.target_path(),
            dtype=self.model.dtype,
            device=self.model.device,
            capture_layers=capture_layers,
            block_size=self.kv.block_size,
            num_blocks=self.kv.num_blocks,
            kv_cache_bytes=self.kv.cache_bytes,
            max_model_len=self.model.max_model_len,
            max_live=self.scheduler.max_live,
            num_threads=self.threads,
            cache_dir=self.cache_dir,
            seed=self.seed,
        )

    def drafter_config(self, num_blocks: int) -> DrafterConfig:
        """`num_blocks`: what the verifier found room for; both caches share one block table."""
        return DrafterConfig(
            checkpoint=self.drafter_checkpoint(),
            target=self.target_path(),
            dtype=self.drafter.dtype,
            device=self.drafter.device,
            candidates=self.drafter.candidates,
            max_width=self.drafter.max_width,
            num_blocks=num_blocks,
            block_size=self.kv.block_size,
            num_threads=self.threads,
            cache_dir=self.cache_dir,
            seed=self.seed,
        )


def listed(value: Any) -> Any:
    """A list as a variable or a flag writes it: JSON, or parts separated by commas."""
    if not isinstance(value, str):
        return value
    if value.lstrip().startswith("["):
        return _json(value)
    return [part.strip() for part in value.split(",") if part.strip()]


def _json(text: str) -> Any:
    """Raises ValueError."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deep") from None


def yaml_off(value: Any) -> Any:
    """YAML reads a bare `off` as false."""
    return "off" if value is False else value


@dataclass(frozen=True, slots=True)
class _Sources:
    """Where values came from, weakest first: OpenTelemetry's own variables, the file (or Serve args) and its name, the
    environment, the flags."""

    standard: Mapping[str, Any]
    base: Mapping[str, Any]
    base_name: str
    environment: Mapping[str, Any]
    flags: Mapping[str, Any]

    def merged(self) -> dict[str, Any]:
        layers = (self.standard, self.base, self.environment, self.flags)
        return functools.reduce(_deep_merge, layers, {})

    def origin(self, keys: tuple[str, ...]) -> str:
        if _holds(self.flags, keys):
            return "command line"
        if _holds(self.environment, keys):
            names = itertools.takewhile(lambda part: not part.isdigit(), keys)  # a number is a place in a list
            return f"environment variable {variable_name(tuple(names))}"
        if _holds(self.standard, keys) and not _holds(self.base, keys):
            return f"environment variable {_OTEL_PREFIX}{keys[-1].upper()}"
        return self.base_name


def load_settings(
    file: str | os.PathLike[str] | None = None,
    *,
    args: Mapping[str, Any] | None = None,
    flags: Mapping[str, Any] | None = None,
) -> Settings:
    """The settings in force. `args` stand in for a file (a Serve application's arguments)."""
    path = file or (os.environ.get(FILE_VARIABLE) or None if args is None else None)
    base = dict(args or {}) if path is None else read_file(Path(path))
    base_name = str(path) if path is not None else "application args"
    _refuse_unknown_variables()
    sources = _Sources(_read_standard_variables(), base, base_name, _read_environment(), flags or {})
    tree = sources.merged()
    _refuse_unprintable(tree, sources)
    try:
        return Settings.model_validate(tree)
    except ValidationError as error:
        raise _settings_error(error, sources) from None


def _read_environment() -> dict[str, Any]:
    source = EnvSettingsSource(
        Settings, env_prefix=PREFIX, env_nested_delimiter=DELIMITER, env_parse_none_str="null", env_ignore_empty=True
    )
    try:
        return source()
    except (EnvParseError, RecursionError):
        raise _unreadable_variable() from None


def _unreadable_variable() -> SettingsError:
    """Of the variables that must be JSON, the one that is not: pydantic-settings names the section above it at most."""
    for name, text in sorted(os.environ.items()):
        if (keys := _composite_variables().get(name.upper())) is None or not text:
            continue
        try:
            _json(text)
        except ValueError:
            fix = f"set each key by itself, as in {name}{DELIMITER}KEY=value"
            if not _is_section(keys):
                fix = f"""write {name}='{{"NAME": "VALUE"}}'"""
            return SettingsError(f"environment variable {name}: not valid JSON; {fix}")
    return SettingsError(f"environment variables {PREFIX}*: one is not valid JSON; set each key by itself")


def _composite_variables() -> dict[str, tuple[str, ...]]:
    """Variables whose values are whole mappings."""
    return {variable_name(keys): keys for keys in known_keys() if _is_section(keys) or keys[-1] == "keys"}


def _is_section(keys: tuple[str, ...]) -> bool:
    return any(len(other) > len(keys) and other[: len(keys)] == keys for other in known_keys())


def _refuse_unprintable(value: Any, sources: _Sources, keys: tuple[str, ...] = ()) -> None:
    """No name, path or address has control characters or halves of characters; far from here they are riddles."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            _refuse_unprintable(str(key), sources, (*keys, ascii(key)))
            _refuse_unprintable(part, sources, (*keys, str(key)))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            _refuse_unprintable(part, sources, (*keys, str(index)))
    elif isinstance(value, str) and (found := _UNPRINTABLE.search(value)):
        raise SettingsError(
            f"{'.'.join(keys)}: has the character {found[0]!a}, which must be taken out (from {sources.origin(keys)})"
        )


def _read_standard_variables() -> dict[str, Any]:
    """What OpenTelemetry's variables say; ours win. The one for traces alone is the stronger of two."""
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return {}
    found = {}
    for name in ("endpoint", "protocol"):
        general = os.environ.get(f"{_OTEL_PREFIX}{name.upper()}")
        if value := os.environ.get(f"{_OTEL_PREFIX}TRACES_{name.upper()}") or general:
            found[name] = value
    return {"tracing": found} if found else {}


def variable_name(keys: tuple[str, ...]) -> str:
    return PREFIX + DELIMITER.join(keys).upper()


def known_keys(model: type[BaseModel] = Settings, above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every key of the tree, sections included."""
    for name, info in model.model_fields.items():
        yield (*above, name)
        section = _section_of(info)
        if section is not None:
            yield from known_keys(section, (*above, name))


def _section_of(info: FieldInfo) -> type[BaseModel] | None:
    candidates = (info.annotation, *get_args(info.annotation))
    return next((kind for kind in candidates if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _refuse_unknown_variables() -> None:
    """pydantic-settings passes over variables it does not know; a misspelt one must not be."""
    known = {variable_name(keys): keys for keys in known_keys()}
    for name in sorted(os.environ):
        upper = name.upper()
        if not upper.startswith(PREFIX) or upper == FILE_VARIABLE or upper in known or _is_service_link(upper):
            continue
        raise SettingsError(f"environment variable {name}: unknown setting{suggestion(upper, known)}")


def _is_service_link(name: str) -> bool:
    return DELIMITER not in name and _SERVICE_LINK.fullmatch(name) is not None


def suggestion(wrong: str, known: Mapping[str, Any]) -> str:
    """What may have been meant, to end a message with."""
    close = difflib.get_close_matches(wrong, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _settings_error(error: ValidationError, sources: _Sources) -> SettingsError:
    first = error.errors(include_url=False)[0]
    keys = tuple(str(part) for part in first["loc"])
    name, origin = ".".join(keys), sources.origin(keys)
    if first["type"] == "extra_forbidden":
        known = {".".join(each): each for each in known_keys()}
        return SettingsError(f"{name}: unknown key (from {origin}){suggestion(name, known)}")
    reason = first["msg"].removeprefix("Value error, ")
    if keys[:2] == ("gateway", "auth"):
        return SettingsError(f"{name}: {reason} (from {origin})")
    if first["type"] in ("model_type", "model_attributes_type"):
        reason = f"is a section and needs keys below it, as in {name}.KEY"
    return SettingsError(f"{name}: {reason}, got {_BRIEF.repr(first['input'])} (from {origin})")


def _holds(tree: Mapping[str, Any], keys: tuple[str, ...]) -> bool:
    for key in keys:
        if not isinstance(tree, Mapping):
            return True  # below this it is a part of a list
        if key not in tree:
            return False
        tree = tree[key]
    return True


def _deep_merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(merged.get(key), Mapping) and isinstance(value, Mapping)
        merged[key] = _deep_merge(merged[key], value) if both else value
    return merged
