"""The Helm chart's schema and its README tables, from services/settings.py and values.yaml."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from services.settings import Settings, known_keys

CHART = Path("helm/dspark-serve")

# What the chart sets itself, and what must not stand in values because Serve's config can be read by everybody on the cluster.
OWNED = ("gateway.host", "gateway.auth.keys", "gateway.auth.keys_file")
# What the server checks by code: Helm shows the expression, so it reads as the list of what may be written.
_FORMS = {"scheduler.planner": r"^(auto|algorithm1|off|fixed:[1-9][0-9]*|threshold:(0|1|0?[.][0-9]+|1[.]0+))$"}
# YAML reads a bare `off` as false, and so does the server.
_MAY_BE_OFF = ("scheduler.planner", "gateway.reasoning", "gateway.speculation_metrics", "gateway.access_log.to")

Schema = dict[str, Any]
_TEXT: Schema = {"type": "string"}
_COUNT: Schema = {"type": "integer", "minimum": 0}
_POSITIVE: Schema = {"type": "number", "exclusiveMinimum": 0}
_TEXTS: Schema = {"type": "object", "additionalProperties": _TEXT}
_QUANTITY: Schema = {"type": ["string", "number"]}
# Kubernetes' own objects, which its API server checks.
_FOREIGN: Schema = {"type": "object"}
_FOREIGN_LIST: Schema = {"type": "array", "items": _FOREIGN}


def _object(properties: Schema, *required: str) -> Schema:
    schema: Schema = {"type": "object", "additionalProperties": False, "properties": properties}
    return schema | ({"required": list(required)} if required else {})


def _choice(*values: str) -> Schema:
    return {"enum": list(values)}


_AMOUNTS = _object({"cpu": _QUANTITY, "memory": _QUANTITY, "ephemeral-storage": _QUANTITY})
_RESOURCES = _object({"requests": _AMOUNTS, "limits": _AMOUNTS})
_POD: Schema = {
    "resources": _RESOURCES,
    "nodeSelector": _TEXTS,
    "tolerations": _FOREIGN_LIST,
    "affinity": _FOREIGN,
}
_GROUP = _object(
    {
        **_POD,
        "replicas": _COUNT,
        "minReplicas": _COUNT,
        "maxReplicas": {"type": "integer", "minimum": 1},
        "gpus": _COUNT,
        "runtimeClassName": _TEXT,
        "topologySpreadConstraints": _FOREIGN_LIST,
    }
)
_MODEL_VOLUME = _object(
    {
        # with `model-` before it a label of at most 63
        "name": {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 57},
        "mountPath": {"type": "string", "pattern": "^/"},
        "claim": _TEXT,
        "subPath": _TEXT,
        "image": _TEXT,
        "fetch": _object(
            {
                "image": _TEXT,
                "command": {"type": "array", "minItems": 1, "items": _TEXT},
                "secret": _TEXT,
                "size": _QUANTITY,
            },
            "image",
            "command",
        ),
    },
    "name",
    "mountPath",
)
_GATEWAY_REFERENCE = _object({"name": _TEXT, "namespace": _TEXT, "sectionName": _TEXT}, "name")
_VARIABLE = _object(
    {"name": {"type": "string", "not": {"pattern": "^DSPARK_"}}, "value": _TEXT, "valueFrom": _FOREIGN}, "name"
)

# Values whose default alone does not say what they may be.
_STATED: dict[str, Schema] = {
    "imagePullSecrets": {"type": "array", "items": _object({"name": _TEXT}, "name")},
    "image.pullPolicy": _choice("Always", "IfNotPresent", "Never"),
    "image.digest": {"type": "string", "pattern": "^(sha256:[0-9a-f]{64})?$"},
    "modelVolumes": {"type": "array", "items": _MODEL_VOLUME},
    "modelCache.accessModes": {
        "type": "array",
        "minItems": 1,
        "items": _choice("ReadWriteOnce", "ReadWriteOncePod", "ReadWriteMany"),
    },
    "head": _object(_POD),
    "workerGroups": {
        "type": "object",
        # a name is the value of a label of pods
        "propertyNames": {"pattern": "^[a-z]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63},
        "additionalProperties": {"anyOf": [{"type": "null"}, _GROUP]},
    },
    "upgradeStrategy": _choice("NewCluster", "None"),
    "service.type": _choice("ClusterIP", "NodePort", "LoadBalancer"),
    "httpRoute.parentRefs": {"type": "array", "items": _GATEWAY_REFERENCE},
    "httpRoute.hostnames": {"type": "array", "items": _TEXT},
    "probes.readinessPath": _choice("/ready", "/health", "/-/healthz"),
    "serveProxy.healthCheckPeriodSeconds": _POSITIVE,
    "serveProxy.healthCheckTimeoutSeconds": _POSITIVE,
    "serveProxy.readyCheckTimeoutSeconds": _POSITIVE,
    "podDisruptionBudget.maxUnavailable": {"type": ["integer", "string"], "minimum": 0, "pattern": "^[0-9]+%$"},
    "networkPolicy.clients": _FOREIGN_LIST,
    "prometheusRule.runbookBase": {"type": "string", "pattern": "^[A-Za-z0-9./][A-Za-z0-9/:._~?=&%#@+-]*$"},
    "podSecurityContext": _FOREIGN,
    "containerSecurityContext": _FOREIGN,
    "extraEnv": {"type": "array", "items": _VARIABLE},
    "extraVolumes": _FOREIGN_LIST,
    "extraVolumeMounts": _FOREIGN_LIST,
    "initContainers": _FOREIGN_LIST,
    "logging.encoding": _choice("JSON", "TEXT"),
    "logging.level": _choice("DEBUG", "INFO", "WARNING", "ERROR"),
} | dict.fromkeys(
    (
        "service.annotations",
        "ingress.annotations",
        "httpRoute.annotations",
        "networkPolicy.operatorNamespace",
        "networkPolicy.monitoringNamespace",
        "serviceAccount.annotations",
        "podLabels",
        "podAnnotations",
        "serviceMonitor.additionalLabels",
        "podMonitor.additionalLabels",
        "prometheusRule.additionalLabels",
        "grafanaDashboards.labels",
        "grafanaDashboards.annotations",
    ),
    _TEXTS,
)
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}


def settings_schema() -> Schema:
    """The tree of services/settings.py without the keys that the chart owns. References are written out."""
    document = Settings.model_json_schema()
    return _plain(document, document["$defs"], ())


def _plain(schema: Schema, definitions: Schema, path: tuple[str, ...]) -> Schema:
    if "$ref" in schema:
        schema = definitions[schema["$ref"].rpartition("/")[2]]
    kept = {key: value for key, value in schema.items() if key not in ("title", "$defs", "default", "description")}
    if "properties" not in schema:
        if form := _FORMS.get(".".join(path)):
            kept["pattern"] = form
        return {"anyOf": [kept, {"const": False}]} if ".".join(path) in _MAY_BE_OFF else kept
    kept["properties"] = {
        name: _plain(each, definitions, (*path, name))
        for name, each in schema["properties"].items()
        if ".".join((*path, name)) not in OWNED
    }
    kept["additionalProperties"] = False
    return kept


def chart_schema(values: Schema) -> Schema:
    """Of the whole values.yaml. Raises TypeError for a default that says nothing about its kind and is not stated above."""
    properties = {
        name: settings_schema() if name == "settings" else _of_value(each, (name,)) for name, each in values.items()
    }
    # Helm adds `global` to the values of every chart.
    properties["global"] = _FOREIGN
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **_object(properties)}


def _of_value(value: Any, path: tuple[str, ...]) -> Schema:
    name = ".".join(path)
    if name in _STATED:
        return _STATED[name]
    if isinstance(value, dict) and value:
        return _object({key: _of_value(each, (*path, key)) for key, each in value.items()})
    if type(value) not in _TYPES:
        raise TypeError(f"values.yaml: {name} needs a schema in services/operations/chart.py")
    return {"type": _TYPES[type(value)]} | ({"minimum": 0} if type(value) is int else {})


def values_table(text: str, values: Schema) -> str:
    """A row for each key with a `# --` line in values.yaml."""
    rows: list[str] = []
    above: list[str] = []
    said = ""
    for line in text.splitlines():
        comment = re.match(r"\s*# (?:-- )?(.*)", line)
        if comment:
            said = comment[1] if "# -- " in line else f"{said} {comment[1]}" if said else ""
            continue
        key = re.match(r"( *)(\w+):", line)
        if key is None:
            said = ""
            continue
        above = [*above[: len(key[1]) // 2], key[2]]
        if said:
            rows.append(f"| `{'.'.join(above)}` | `{_shown(values, above)}` | {said} |")
        said = ""
    return "\n".join(["| value | default | meaning |", "|---|---|---|", *rows])


def _shown(values: Any, path: list[str]) -> str:
    for key in path:
        values = values[key]
    return json.dumps(values)


def settings_table() -> str:
    rows = []
    document = Settings.model_json_schema()
    defaults = json.loads(Settings().model_dump_json())
    for path in known_keys():
        name, default = ".".join(path), defaults
        for key in path:
            default = default[key]
        if isinstance(default, dict) and default:
            continue
        note = " (not in values)" if name in OWNED else ""
        rows.append(f"| `settings.{name}`{note} | `{json.dumps(default)}` | {_kind(document, path)} |")
    return "\n".join(["| setting | default | what |", "|---|---|---|", *rows])


def _kind(document: Schema, path: tuple[str, ...]) -> str:
    schema, definitions = document, document["$defs"]
    for key in path:
        schema = schema["properties"][key]
        schema = definitions[schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
    kinds = schema.get("anyOf", [schema])
    words = [", ".join(map(str, each["enum"])) if "enum" in each else each.get("type", "any") for each in kinds]
    least = "".join(f", from {each['minimum']}" for each in kinds if "minimum" in each)
    return " or ".join(words) + least


def between(text: str, mark: str, inside: str) -> str:
    """`text` with what stands between <!-- mark --> and <!-- /mark --> replaced."""
    begin, end = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{begin} and {end} are missing")
    return f"{before}{begin}\n{inside}\n{end}{after}"


def chart_files(root: Path) -> dict[Path, str]:
    """The generated files of the chart and what they should hold."""
    chart = root / CHART
    text = (chart / "values.yaml").read_text(encoding="utf-8")
    values = yaml.safe_load(text)
    readme = (chart / "README.md").read_text(encoding="utf-8")
    readme = between(readme, "values", values_table(text, values))
    readme = between(readme, "settings", settings_table())
    return {
        chart / "values.schema.json": json.dumps(chart_schema(values), indent=1) + "\n",
        chart / "README.md": readme,
    }
