"""Bound what values may become through references to other values.

With ``b: ${a}${a}``, ``c: ${b}${b}`` and so on, each key doubles the text.
"""

from __future__ import annotations

import re
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runner.config.problem import Problem, RequestError

LONGEST = 20_000
"""Characters of a value with those that it refers to. Resolving reads some 30,000 a second."""

_REFERENCE = re.compile(r"\$\{(?:[\w.]+:)?([^${}:]*)\}")
"""``${key}``, and the arguments of ``${resolver:key,key}``."""


def look_up(node: Any, key: str) -> tuple[bool, Any]:
    """Return whether a dotted key exists in plain containers, and what it holds."""
    for part in key.replace("[", ".").replace("]", "").split("."):
        if isinstance(node, list) and part.isdigit() and int(part) < len(node):
            node = node[int(part)]
        elif isinstance(node, dict) and part in node:
            node = node[part]
        else:
            return False, None
    return True, node


def require_bounds(config: DictConfig) -> None:
    """Refuse a configuration with a value that is too long once it is resolved.

    Raises:
        RequestError: it names the first such value.
    """
    root: Any = OmegaConf.to_container(config, resolve=False)
    hydra = root.pop("hydra", None)  # it repeats the overrides
    sizes: dict[str, int] = {}
    _size(root, "", root, sizes)
    _size(hydra, "hydra", {**root, "hydra": hydra}, sizes)


def _size(node: Any, key: str, root: Any, sizes: dict[str, int]) -> int:
    """Return the number of characters of a value, and of those that it refers to.

    Args:
        node: the value, its references not resolved.
        key: its dotted key.
        root: the whole configuration.
        sizes: the result for each key that was asked for; 0 while it is computed.
    """
    if key in sizes:
        return sizes[key]
    sizes[key] = 0
    if isinstance(node, dict | list):
        items = node.items() if isinstance(node, dict) else enumerate(node)
        size = sum(_size(part, f"{key}.{name}".lstrip("."), root, sizes) for name, part in items)
    else:
        text = node if isinstance(node, str) else ""
        size = len(text)
        for names in _REFERENCE.findall(text):
            for name in names.split(","):
                target = _absolute(name.strip(), key)
                exists, content = look_up(root, target)
                size += _size(content, target, root, sizes) if exists else 0
        if size > LONGEST and "${" in text:
            message = f"has more than {LONGEST:,} characters with the values that it refers to"
            raise RequestError([Problem(key, text, message)])
    sizes[key] = size
    return size


def _absolute(name: str, key: str) -> str:
    """Return the full key of a reference: ``.a`` stands beside ``key``, ``..a`` a level above."""
    levels = len(name) - len(name.lstrip("."))
    parts = key.split(".")
    return ".".join([*(parts[:-levels] if levels else ()), name.lstrip(".")])
