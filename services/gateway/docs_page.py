"""The documentation page: /openapi.json as one HTML page that needs nothing from anywhere else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
h2{margin-top:2.5rem;border-bottom:1px solid #ccc}code,pre{font:14px/1.45 ui-monospace,monospace;background:#f4f4f4}
pre{padding:.75rem;overflow:auto}table{border-collapse:collapse;width:100%}
td,th{text-align:left;vertical-align:top;padding:.25rem .75rem .25rem 0;border-bottom:1px solid #eee}
.verb{font-weight:700;text-transform:uppercase;margin-right:.5rem}
"""


def docs_page(document: Mapping[str, Any]) -> str:
    parts = [f"<h1>{escape(document['info']['title'])}</h1>", _paragraph(document["info"].get("description", ""))]
    parts.append('<p>The same as data: <a href="openapi.json">openapi.json</a>.</p>')
    for path, operations in document["paths"].items():
        for verb, operation in operations.items():
            parts += _operation(document, path, verb, operation)
    head = f'<meta charset="utf-8"><title>{escape(document["info"]["title"])}</title><style>{_STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'


def _operation(document: Mapping[str, Any], path: str, verb: str, operation: Mapping[str, Any]) -> Iterator[str]:
    yield f'<h2><span class="verb">{verb}</span><code>{escape(path)}</code></h2>'
    yield _paragraph(operation.get("description", ""))
    body = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if body is not None:
        schema = _resolved(document, body["schema"])
        yield _paragraph(schema.get("description", ""))
        yield _table(("field", "type", "rule"), _fields(schema))
        yield f"<pre>{escape(json.dumps(body.get('example'), indent=2))}</pre>"
    answers = (
        (f"<b>{status}</b>", escape(each.get("description", ""))) for status, each in operation["responses"].items()
    )
    yield _table(("status", "meaning"), answers)


def _fields(schema: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        arms = [arm for arm in field.get("anyOf", [field]) if arm.get("type") != "null"]
        kind = " or ".join(dict.fromkeys(_kind(arm) for arm in arms))
        rules = [f"{word} {arm[key]:g}" for arm in arms for key, word in _BOUNDS.items() if key in arm]
        yield (
            f"<code>{escape(name)}</code>",
            escape(kind),
            escape(", ".join((["required"] if name in required else []) + rules)),
        )


_BOUNDS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<", "maxLength": "length ≤"}


def _kind(schema: Mapping[str, Any]) -> str:
    if "$ref" in schema:
        return str(schema["$ref"]).rpartition("/")[2]
    if "enum" in schema:
        return " | ".join(map(str, schema["enum"]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type", "any"))


def _resolved(document: Mapping[str, Any], schema: Mapping[str, Any]) -> Mapping[str, Any]:
    name = str(schema.get("$ref", "")).rpartition("/")[2]
    found: Mapping[str, Any] = document["components"]["schemas"].get(name, schema)
    return found


def _paragraph(text: str) -> str:
    return "".join(f"<p>{escape(each)}</p>" for each in text.split("\n\n") if each.strip())


def _table(head: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> str:
    lines = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    return "<table><tr>" + "".join(f"<th>{cell}</th>" for cell in head) + f"</tr>{lines}</table>"
