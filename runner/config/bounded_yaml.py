"""Load YAML that may be damaged, or made to do harm.

libyaml composes a document by recursion in C, so that a deep one ends the process, and aliases let
a short document stand for one of any size. Both are counted before anything is composed.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import yaml

DEEPEST = 64
"""Levels of a document."""

MOST_NODES = 200_000
"""Keys, values and items of a document, with those that aliases stand for."""

LONGEST_NUMBER = 400
"""Characters of a number: the time to read an integer grows with the square of its length."""

if TYPE_CHECKING:
    from yaml import SafeLoader as _Base
else:
    # libyaml, if PyYAML was built with it, is ten times as fast: a large sweep has 256 runs.
    _Base = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_TEXT, _INT, _FLOAT = (f"tag:yaml.org,2002:{kind}" for kind in ("str", "int", "float"))
_DATE = "tag:yaml.org,2002:timestamp"


class _Loader(_Base):
    """Reads what OmegaConf's loader reads: ``1e-3`` is a number, and a date is text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Make a dict; a text that is a key twice is refused."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.tag == _TEXT:
                if key.value in seen:
                    raise _problem(f"found duplicate key {key.value}", key.start_mark)
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _number(loader: _Loader, node: yaml.ScalarNode) -> float:
    if len(node.value) > LONGEST_NUMBER:
        raise _problem(f"a number of {len(node.value):,} characters", node.start_mark)
    if node.tag == _INT:
        return loader.construct_yaml_int(node)
    return loader.construct_yaml_float(node)


_Loader.add_constructor(_INT, _number)
_Loader.add_constructor(_FLOAT, _number)
_Loader.add_implicit_resolver(
    _FLOAT, re.compile(r"^[-+]?[0-9](?:_?[0-9])*(?:\.[0-9_]*)?[eE][-+]?[0-9]+$"), "-+0123456789"
)
_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in known if tag != _DATE]
    for first, known in _Loader.yaml_implicit_resolvers.items()
}


def load_yaml(text: str) -> Any:
    """Return the content of a YAML document as plain containers.

    Raises:
        yaml.YAMLError: it is no YAML, or exceeds a bound of this module.
    """
    try:
        _require_bounds(text)
        return yaml.load(text, Loader=_Loader)
    except yaml.YAMLError:
        raise
    except Exception as error:  # of a value that its tag does not fit, such as !!bool maybe
        raise yaml.YAMLError(f"{type(error).__name__}: {error}") from None


def _require_bounds(text: str) -> None:
    sizes: dict[str, int] = {}  # nodes that each anchor stands for
    begun: list[tuple[str | None, int]] = []  # open collections: anchor, and nodes before it
    nodes = 0
    for event in yaml.parse(text, Loader=_Loader):
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = begun.pop()
            size = nodes - before
        elif isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes:
                raise _problem(f"*{event.anchor} stands for nothing yet", event.start_mark)
            anchor, size = None, 0
            nodes += sizes[event.anchor]
        elif isinstance(event, yaml.NodeEvent):
            nodes += 1
            anchor, size = event.anchor, 1
            if isinstance(event, yaml.CollectionStartEvent):
                begun.append((anchor, nodes - 1))
                anchor = None  # it can be referred to once it is complete
        else:
            continue
        if anchor is not None:
            sizes[anchor] = size
        if len(begun) > DEEPEST:
            raise _problem(f"nested more than {DEEPEST} levels deep", event.start_mark)
        if nodes > MOST_NODES:
            raise _problem(f"more than {MOST_NODES:,} values", event.start_mark)


def _problem(message: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=message, problem_mark=mark)
