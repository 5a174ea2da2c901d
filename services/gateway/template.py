"""Renders chat messages with the model's own Jinja template, in a sandbox, as transformers does.

Written here because importing transformers imports torch, which a gateway must not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from scheduler.errors import BadParams, SettingsError


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's text for training; when serving it is only its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter escapes HTML characters, which templates for models do not want."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


class ChatTemplate:
    """`variables`: the names that the template reads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateError as error:
            raise SettingsError(f"model.chat_template: the template does not compile: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None = None) -> str:
        """The prompt text up to where the assistant's answer begins. `variables` are the template's own (`tools`,
        `enable_thinking`); raises BadParams when it cannot make a prompt of the messages."""
        defaults = {"tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return self._template.render(
                {**defaults, **(variables or {}), **self._special_tokens, "messages": messages}
            )
        except Exception as error:
            # The template is the model's own; whatever it trips over is in the messages or the variables.
            reason = str(error) or type(error).__name__
            raise BadParams(f"the model's chat template refuses these messages: {reason}", param="messages") from None
