"""Objects of KubeRay, the Prometheus operator and the Gateway API against their definitions, with unknown keys forbidden.

RayService and HTTPRoute: data/custom_resources, where whatever is Kubernetes' own (pods, services) is kubernetes-validate's.
Monitors and rules: the models that the package cloudcoil-models-prometheus-operator makes of the operator's definitions.
`python -m tests.custom_resources CRD.yaml ...` compares the former with the definitions of a cluster or a release
(`kubectl get crd rayservices.ray.io -o yaml`) and lists where they are not at one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pydantic
import yaml
from referencing import Registry, Resource

KUBERNETES = "1.33"
_FOLDER = Path(__file__).parent / "data" / "custom_resources"
_KUBERNETES_OWN = "kubernetes:"
_LIMITS = ("minimum", "maximum", "minItems", "maxItems", "enum", "required")

Schema = dict[str, Any]


def faults(rendered: dict[str, Any]) -> dict[str, str]:
    """By path: each key that the definition has not, and each value that it does not allow."""
    own_models = rendered["apiVersion"].startswith("monitoring.coreos.com/")
    return dict(_faults_by_model(rendered) if own_models else _faults_by_schema(rendered))


def _faults_by_schema(rendered: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for error in validator(rendered["kind"].lower()).iter_errors(rendered):
        place = "".join(f"/{part}" for part in error.absolute_path)
        unknown = isinstance(error.instance, dict) and error.instance.keys() - error.schema.get("properties", {}).keys()
        if error.validator == "additionalProperties" and unknown:
            yield from ((f"{place}/{key}", "no such key") for key in sorted(unknown))
        else:
            yield place, error.message


def _faults_by_model(rendered: dict[str, Any]) -> Iterator[tuple[str, str]]:
    from cloudcoil.models.prometheus_operator import v1

    model = getattr(v1, rendered["kind"])
    try:
        # strict: "15" is no number; the models say `int | str` where Kubernetes takes both.
        model.model_validate_json(json.dumps(rendered), extra="forbid", strict=True)
    except pydantic.ValidationError as refusal:
        for error in refusal.errors():
            yield _place(rendered, error["loc"]), error["msg"]


def _place(rendered: Any, location: tuple[int | str, ...]) -> str:
    """The path as far as the object has it: pydantic adds the members of a union that it tried."""
    place, part = "", rendered
    for step in location:
        if step not in (part if isinstance(part, dict) else range(len(part)) if isinstance(part, list) else ()):
            break
        place, part = f"{place}/{step}", part[step]
    return place


@cache
def validator(name: str) -> jsonschema.Draft202012Validator:
    schema = _closed(yaml.safe_load((_FOLDER / f"{name}.yaml").read_text()))
    registry: Registry = Registry().with_resource("https://kubernetes", Resource.from_contents(_kubernetes()))
    return jsonschema.Draft202012Validator(schema, registry=registry)


@cache
def _kubernetes() -> Schema:
    """Kubernetes' own objects, each closed to unknown keys."""
    folder = files("kubernetes_validate") / "kubernetes-json-schema" / f"v{KUBERNETES}.0-local-strict"
    return json.loads((folder / "_definitions.json").read_text())


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        closed["additionalProperties"] = False
    if str(schema.get("$ref", "")).startswith(_KUBERNETES_OWN):
        closed["$ref"] = f"https://kubernetes#/$defs/io.k8s.{schema['$ref'].removeprefix(_KUBERNETES_OWN)}"
    return closed


def differences(written: Schema, defined: Schema) -> list[str]:
    """Where the schema of data/custom_resources and a definition's openAPIV3Schema are not at one: keys, types, limits. Below
    what is Kubernetes' own the definition may have more, as it may be of a later Kubernetes. `status` is nobody's to set."""
    given = {key: each for key, each in defined["properties"].items() if key not in ("apiVersion", "kind", "status")}
    mine = {key: each for key, each in written["properties"].items() if key not in ("apiVersion", "kind")}
    # A definition leaves metadata to Kubernetes.
    mine["metadata"] = {"type": "object"}
    return list(_differences({"properties": mine}, {"properties": given}, written, ""))


def _differences(ours: Schema, theirs: Schema, root: Schema, path: str) -> Iterator[str]:
    ours, root = _resolved(ours, root)
    own = root is not _kubernetes()
    kind, stated = ours.get("type"), theirs.get("type")
    if kind and stated and stated not in ([kind] if isinstance(kind, str) else kind):
        yield f"{path}: {kind} here, {stated} in the definition"
    for limit in _LIMITS if own else ():
        if ours.get(limit) != theirs.get(limit):
            yield f"{path}: {limit} is {ours.get(limit)} here, {theirs.get(limit)} in the definition"
    mine, given = ours.get("properties", {}), theirs.get("properties", {})
    if not own and path.endswith("/metadata"):
        return  # the definition has the few keys of it that a template may set
    yield from (f"{path}/{key}: not in the definition" for key in sorted(mine.keys() - given.keys()))
    yield from (f"{path}/{key}: only in the definition" for key in sorted(given.keys() - mine.keys()) if own)
    for key in sorted(mine.keys() & given.keys()):
        yield from _differences(mine[key], given[key], root, f"{path}/{key}")
    for key in ("items", "additionalProperties"):
        if isinstance(ours.get(key), dict) and isinstance(theirs.get(key), dict):
            yield from _differences(ours[key], theirs[key], root, f"{path}/*")


def _resolved(schema: Schema, root: Schema) -> tuple[Schema, Schema]:
    """What a reference leads to, and the document in which the references below it are."""
    while reference := schema.get("$ref", ""):
        if reference.startswith(_KUBERNETES_OWN):
            root = _kubernetes()
        name = reference.removeprefix("#/$defs/").replace(_KUBERNETES_OWN, "io.k8s.")
        schema = root["$defs"][name]
    return schema, root


def defined_in(definition: Schema) -> tuple[str, Schema]:
    """Name of the file and the schema of the stored version that a CustomResourceDefinition gives."""
    name = definition["spec"]["names"]["kind"].lower()
    (version,) = [each for each in definition["spec"]["versions"] if each["name"] == "v1"]
    return name, version["schema"]["openAPIV3Schema"]


def main(paths: list[str]) -> int:
    found = 0
    for path in paths:
        for definition in yaml.load_all(Path(path).read_text(), Loader=yaml.CSafeLoader):
            name, schema = defined_in(definition)
            for line in differences(yaml.safe_load((_FOLDER / f"{name}.yaml").read_text()), schema):
                print(f"{name}{line}")
                found += 1
    print(f"{found} differences")
    return min(found, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
