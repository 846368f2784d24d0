"""Load YAML as Hydra reads it, by libyaml."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

if TYPE_CHECKING:
    from yaml import SafeLoader as _Base
else:
    # libyaml, if PyYAML was built with it, is ten times as fast: a large sweep has 256 runs.
    _Base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_TEXT, _FLOAT, _DATE = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "float", "timestamp"))


class _Loader(_Base):
    """Reads what OmegaConf's loader reads: ``1e-3`` is a number, and a date is text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Make a dict; a text that is a key twice is refused."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == _TEXT:
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"found duplicate key {key.value}", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


_Loader.add_implicit_resolver(
    _FLOAT, re.compile(r"^[-+]?[0-9](?:_?[0-9])*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), "-+0123456789"
)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in known if tag != _DATE]
    for first, known in _Loader.yaml_implicit_resolvers.items()
}


def load_yaml(text: str) -> Any:
    """Return the content of a YAML document as plain containers."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        raise
    except Exception as error:  # of a value that its tag does not fit, such as !!bool maybe
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from None
