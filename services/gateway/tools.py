"""The tools of a chat request: what may be called, what must be, and how that reads on the wire.

Validates `tools`, `tool_choice` and `parallel_tool_calls`. Knows no model: how a family writes a call is dialect.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from scheduler.errors import BadParams

MAX_TOOLS = 128


class FunctionSpec(BaseModel):
    """parameters: the JSON schema of the arguments; left out, any object will do. strict: arguments follow the schema also
    where the model chose to call; what the schema has and the grammar cannot express is then refused, else passed over."""

    model_config = ConfigDict(extra="allow", strict=True)

    name: str = Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _of_an_object(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        if parameters and parameters.get("type", "object") != "object":
            raise ValueError('must be the schema of an object ("type": "object")')
        return parameters


class Tool(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    name: str


class NamedTool(BaseModel):
    """The one function that must be called."""

    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(BaseModel):
    """tools: those of the request's that may be called; the model is shown all of them. mode: whether it must."""

    model_config = ConfigDict(extra="allow", strict=True)

    mode: Literal["auto", "required"]
    tools: list[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedToolsChoice(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedToolsChoice


@dataclass(frozen=True, slots=True)
class ToolUse:
    """tools: those the model is shown, none when it must not call. callable: those it may call, all of them unless the
    choice allows fewer. required: it must call at least one, and says nothing else. parallel: it may call several."""

    tools: tuple[Tool, ...] = ()
    callable: tuple[Tool, ...] = ()
    required: bool = False
    parallel: bool = True

    @property
    def names(self) -> frozenset[str]:
        return frozenset(tool.function.name for tool in self.callable)

    @property
    def constrains(self) -> bool:
        """The answer cannot be left to the model alone."""
        strict = any(tool.function.strict for tool in self.callable)
        fewer = len(self.callable) < len(self.tools)
        return self.required or (bool(self.callable) and (strict or fewer or not self.parallel))

    def for_template(self) -> list[dict[str, Any]] | None:
        """As chat templates take them; None when there are none, which is what they test for."""
        return [tool.model_dump(exclude_unset=True) for tool in self.tools] or None


_CHOICES = (
    'must be none, auto, required, {"type": "function", "function": {"name": ...}} '
    'or {"type": "allowed_tools", "allowed_tools": {"mode": ..., "tools": [...]}}'
)


def read_choice(choice: Any) -> Any:
    """By hand, which of the forms is meant: a union would report the complaints of all its arms."""
    if choice is None or choice in ("none", "auto", "required"):
        return choice
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind not in ("function", "allowed_tools"):
        raise ValueError(_CHOICES)
    form: type[BaseModel] = NamedTool if kind == "function" else AllowedToolsChoice
    try:
        return form.model_validate(choice)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def tool_use(tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None) -> ToolUse:
    """Raises BadParams for what cannot be together."""
    declared = tuple(tools or ())
    _check_names(declared)
    if not declared:
        if choice not in (None, "none", "auto"):
            raise BadParams("tool_choice: there are no tools to choose from; add tools", "tool_choice")
        return ToolUse()
    if choice == "none":
        return ToolUse()
    several = parallel is not False
    if isinstance(choice, NamedTool):
        named = _named(declared, choice, "tool_choice")
        return ToolUse(declared, (named,), required=True, parallel=False)
    if isinstance(choice, AllowedToolsChoice):
        asked = choice.allowed_tools
        found = [
            _named(declared, each, f"tool_choice.allowed_tools.tools.{index}") for index, each in enumerate(asked.tools)
        ]
        allowed = tuple(tool for tool in declared if tool in found)
        return ToolUse(declared, allowed, required=asked.mode == "required", parallel=several)
    return ToolUse(declared, declared, required=choice == "required", parallel=several)


def _named(tools: Sequence[Tool], wanted: NamedTool, where: str) -> Tool:
    name = wanted.function.name
    for tool in tools:
        if tool.function.name == name:
            return tool
    raise BadParams(f"{where}.function.name: {name[:64]!r} is none of the tools", f"{where}.function.name")


def _check_names(tools: Sequence[Tool]) -> None:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        if tool.function.name in seen:
            param = f"tools.{index}.function.name"
            raise BadParams(f"{param}: {tool.function.name!r} is there twice", param)
        seen.add(tool.function.name)
