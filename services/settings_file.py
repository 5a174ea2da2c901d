"""How a settings file is read: YAML in which nothing is lost and a number is what it looks like. Knows no setting."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from scheduler.errors import SettingsError

_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)$")
_FLOAT = re.compile(
    r"[-+]?(([0-9]+\.[0-9]*|\.[0-9]+|[0-9]+(?=[eE]))([eE][-+]?[0-9]+)?|\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
)


class _PlainYaml(yaml.SafeLoader):
    """YAML lets the last of two equal keys win, and a section that is written twice would lose its first half unnoticed.

    Numbers are decimal and as they look: YAML 1.1 reads 12:30 as 750 and 010 as 8."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (as the class above it has it)
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NUMBER_TAGS]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        for name in names:
            if names.count(name) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"the key {name!r} stands twice", node.start_mark)
        return super().construct_mapping(node, deep)


for _tag, _pattern in zip(_NUMBER_TAGS, (_INTEGER, _FLOAT), strict=True):
    _PlainYaml.add_implicit_resolver(_tag, _pattern, list("-+.0123456789"))


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in it, keys as text; raises SettingsError."""
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), _PlainYaml)
    except OSError as error:
        raise SettingsError(f"settings file {path}: {error.strerror or error}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise SettingsError(f"settings file {path}: not valid YAML ({' '.join(str(error).split())})") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise SettingsError(f"settings file {path}: must be a mapping of settings, not a {type(loaded).__name__}")
    return {str(key): value for key, value in loaded.items()}
