"""The JSON Schema of the files in ``conf/`` and ``recipes/``, for editors.

The whole describes ``conf/config.yaml`` and recipes, ``#/$defs/<group>`` the options of a group. No
key is required, since a file leaves out what another one gives; and any value may be ``???`` or
refer to other keys by ``${...}``.
"""

from __future__ import annotations

from typing import Any

from runner.config.clip_section import OwnClip, every_option
from runner.config.schema import RunConfig
from runner.config.section import section_of
from runner.config.skip_section import Skip

DRAFT = "http://json-schema.org/draft-07/schema#"

_REFERENCE = {
    "type": "string",
    "pattern": r"^\?\?\?$|\$\{.+\}",
    "description": "??? for a value that must be given, ${key} for that of another key",
}
_DEFAULTS = {
    "type": "array",
    "description": "files that this one starts from, and choices of groups: override /clip: norm",
}
_HYDRA = {"type": "object", "description": "Hydra's own keys: --cfg hydra prints them"}


def json_schema() -> dict[str, Any]:
    """Return the schema."""
    sections = {
        name: section
        for name, field in RunConfig.model_fields.items()
        if (section := section_of(field))
    }
    sections["clip"] = every_option()
    # Sections are described by themselves, so that a file of one option can refer to its own.
    whole = RunConfig.model_json_schema()["properties"]
    definitions = {
        name: _object(section.model_json_schema(), section.__doc__ or "")
        for name, section in sections.items()
    }
    inner = _object(Skip.model_json_schema(), Skip.__doc__ or "")
    definitions["clip.skip"] = inner
    # A file may also give the section the value of its rule.
    short = [{"$ref": "#/$defs/clip.skip"}, *inner["properties"]["rule"]["anyOf"]]
    definitions["clip"]["properties"]["skip"] = {"anyOf": short}
    target = OwnClip.model_json_schema()["properties"]["_target_"]
    definitions["clip"]["properties"]["_target_"] = _value(target)
    properties = {
        name: {"$ref": f"#/$defs/{name}"} if name in sections else schema
        for name, schema in whole.items()
    }
    properties["hydra"] = {"$ref": "#/$defs/hydra"}
    return {
        "$schema": DRAFT,
        "title": "clip-runner",
        **_object({"properties": properties, "additionalProperties": False}, "one run or sweep"),
        "$defs": {**definitions, "hydra": _HYDRA, "launcher": _HYDRA, "reference": _REFERENCE},
    }


def _object(schema: dict[str, Any], description: str) -> dict[str, Any]:
    """Describe a section of which a file may give any part."""
    properties = {name: _value(value) for name, value in schema["properties"].items()}
    return {
        "description": description,
        "type": "object",
        "properties": {"defaults": _DEFAULTS, **properties},
        "additionalProperties": schema["additionalProperties"],
    }


def _value(schema: dict[str, Any]) -> dict[str, Any]:
    """Allow a reference beside the values of a key."""
    if "$ref" in schema:
        return schema
    described = {key: schema[key] for key in ("description",) if key in schema}
    values = {key: value for key, value in schema.items() if key not in ("description", "title")}
    options = values.get("anyOf", [values])
    return {**described, "anyOf": [*options, {"$ref": "#/$defs/reference"}]}
