"""Keep secrets, and values of the environment, out of what is recorded and logged.

A value is a secret if the name of its key, or of its environment variable, says so: ``hf_token``,
``api_key``, ``DB_PASSWORD``. The texts of secrets that a process has met are kept here, so that a
traceback or a log line that quotes one is masked too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

MASK = "***"
"""Stands for a secret in records."""

SHORTEST = 6
"""Fewest characters of a secret that is masked within other text: shorter ones are words too."""

SHORTEST_VALUE = 8
"""The same for a value of the environment that is not known to be a secret."""

_SECRET = re.compile(
    r"(passwo?r?d|_pwd|passphrase|secret|credential|apikey"
    r"|(^|_)(auth|authorization|bearer|jwt|cookie)"
    r"|(^|_)(api|access|account|auth|encryption|private|secret|signing|ssh|wandb)_key)s?$"
    r"|(api|access|auth)_?tokens$|token$"
)
_VOCABULARY = re.compile(
    r"(^|_)(audio|begin|bos|class|cls|end|eos|image|mask|next|num|pad|sep|special|start|stop|unk)"
    r"_token$"
)
_PART = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|[^A-Za-z]+")
_VARIABLE = re.compile(r"\$\{oc\.env:\s*([^,}\s]+)")
_DEFAULT = re.compile(r"(\$\{oc\.env:[^,${}]*,)\s*([^${}]*)(?=\})")
_INNERMOST = re.compile(r"\$\{(oc\.env:[^${}]*|oc\.decode:|[\w.\[\]]+)\}")
_NESTED_KEY = re.compile(r"[{,]\s*['\"]?([\w.-]+)['\"]?\s*:")

Known: TypeAlias = tuple[Mapping[str, str], Mapping[str, str]]
"""What one process knows of secrets, for another one."""

_secrets: dict[str, str] = {}
"""Texts that are hidden everywhere, each with what stands for it."""

_values: dict[str, str] = {}
"""Values of the environment, which are hidden in messages alone."""


def is_secret(name: object) -> bool:
    """Return whether the name of a key, or of a variable, says that its value is a secret."""
    parts = _PART.sub("_", str(name)).lower().strip("_")
    return bool(_SECRET.search(parts)) and not _VOCABULARY.search(parts)


def masked(value: Any, secret: bool = False) -> Any:
    """Return plain containers, references unresolved, with the values of secret keys masked."""
    match value:
        case Mapping():
            return {key: masked(one, secret or is_secret(key)) for key, one in value.items()}
        case list() | tuple():
            return [masked(one, secret) for one in value]
        case None | bool() | "" | "???":
            return value
        case str() if "${" in value and (not secret or _is_reference(value)):
            hides = secret or any(map(is_secret, _VARIABLE.findall(value)))
            return _DEFAULT.sub(_without_default, value) if hides else value
    return MASK if secret else value


def masked_words(words: Iterable[str]) -> list[str]:
    """Return overrides, or arguments of a command, with the values of secret keys masked."""
    return [hide(_masked_word(word), values=False) for word in words]


def learn_secrets(value: Any, secret: bool = False) -> bool:
    """Let :func:`hide` replace the values of secret keys from now on."""
    match value:
        case Mapping():
            found = [learn_secrets(one, secret or is_secret(key)) for key, one in value.items()]
            return any(found)
        case list() | tuple():
            found = [learn_secrets(one, secret) for one in value]
            return any(found)
    text = str(value)
    if secret and len(text) >= SHORTEST:
        _secrets[text] = MASK
    return secret


def learn_environment(read: Mapping[str, Any]) -> None:
    """Let :func:`hide` replace values of environment variables, by their names, from now on."""
    for name, value in read.items():
        text, reference = str(value), f"${{oc.env:{name}}}"
        if text in _secrets or (is_secret(name) and len(text) >= SHORTEST):
            _secrets[text] = reference
        elif len(text) >= SHORTEST_VALUE and not os.path.exists(text):
            _values[text] = reference


def known() -> Known:
    """Return the texts that :func:`hide` replaces, to hand them to another process."""
    return _secrets, _values


def take(given: Known) -> None:
    """Take what :func:`known` returned in another process."""
    _secrets.update(given[0])
    _values.update(given[1])


def hide(text: str, values: bool = True) -> str:
    """Return ``text`` with every known secret replaced, also where it is quoted."""
    texts = _secrets | _values if values else _secrets
    for one in sorted(texts, key=len, reverse=True):
        for form in {one, repr(one)[1:-1], json.dumps(one)[1:-1]}:
            text = text.replace(form, texts[one])
    return text


def hidden(value: Any) -> Any:
    """Return plain containers with every known secret in their texts replaced."""
    match value:
        case str():
            return hide(value, values=False)
        case Mapping():
            return {key: hidden(one) for key, one in value.items()}
        case list() | tuple():
            return [hidden(one) for one in value]
    return value


def _masked_word(word: str) -> str:
    key, equals, value = word.partition("=")
    if not equals:
        return word
    if any(map(is_secret, _NESTED_KEY.findall(value))):
        return f"{key}={MASK}"
    bare = value.strip("'\"")
    kept = masked(bare, is_secret(key))
    return word if kept == bare else f"{key}={kept}"


def _is_reference(text: str) -> bool:
    """Return whether a text has nothing beside references to keys and to the environment."""
    while (rest := _INNERMOST.sub("", text)) != text:
        text = rest
    return not text.strip()


def _without_default(found: re.Match[str]) -> str:
    """Return the beginning of a reference to a variable, with its default masked."""
    begin, default = found.groups()
    return found[0] if default.strip() in ("", "null", "''") else f"{begin}{MASK}"
