"""Mask secrets in containers, in overrides and in texts.

Besides the values of secret keys (`secret.py`), secret are the user part of a URL, the default of
``${oc.env:NAME,DEFAULT}``, what ``hydra.job.env_set`` sets, and the value of an environment
variable with a secret name, wherever it stands. Secrets that this process has read
(:func:`remember`) are masked in all texts, unless one is equal to a name or a path of this program
(`ordinary.py`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from typing import Any
from urllib.parse import quote

from runner.config.ordinary import is_ordinary
from runner.config.secret import (
    INNER,
    MASK,
    PATH,
    REFERENCE,
    hides,
    is_doubtful,
    is_open,
    is_reference,
    is_secret,
    looks_secret,
)

_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE)
_DEFAULT = re.compile(
    r"(\$\{\s*oc\.env\s*:\s*([^,{}\s]+)\s*,)"
    rf"((?:'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|{INNER}|[^{{}}'\"])*)\}}"
)
# No pattern starts anew inside of a long word: the time would grow with its square.
_URL = re.compile(r"([\w+.-]{0,30})://((?:\$\{[^{}]*\}|(?!\$\{)[^\s/?#'\"<>])+)@")
_SIGNED = re.compile(
    r"([?&](?:sig|signature|key|x-(?:amz|goog)-signature)="
    r"|hooks\.slack\.com/services/|/api/webhooks/)[^\s&#'\"]+",
    re.IGNORECASE,
)
_QUOTED = r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\""
_VALUE = re.compile(rf"{_QUOTED}|{REFERENCE.pattern}|[^\s,;&|)}}\]'\"]+")
_PAIR = re.compile(r"(?<![\w.-])([\w.-]+)(['\"]?\s*=\s*|['\"]?:)(\s*)")
_FLAG = re.compile(rf"(?<![\w-])(--?[A-Za-z][\w-]*)(['\"]?(?:\s+|\s*,\s*))({_VALUE.pattern})")
_LOGIN = r"Bearer|Basic|[Aa]uthorization['\"]?\s*[:=]\s*['\"]?\w+"
_BEARER = re.compile(rf"\b({_LOGIN})(\s+)(?=[\w.~+/=-]*[\d=])[\w.~+/=-]{{6,}}")
_INSIDE = re.compile(r"[{,]\s*['\"]?([\w.@/-]+)['\"]?\s*:")  # a key of a mapping in an override

_remembered: dict[str, None] = {}


def masked(value: Any, key: str = "", known: Iterable[str] = ()) -> Any:
    """Return plain containers, references unresolved, without secrets.

    Args:
        value: the containers, or a single value.
        key: the key that ``value`` itself has.
        known: secrets to find in all texts, besides the secrets of the environment.
    """
    return _masked(value, str(key), is_secret(str(key)), [*_variants(known), *_of_environment()])


def _masked(value: Any, key: str, secret: bool, known: list[str]) -> Any:
    """Return a value without secrets; ``secret``: its key, or one around it, names a secret."""
    if isinstance(value, Mapping):
        return _mapping_masked(value, secret, known)
    if isinstance(value, list):
        return _list_masked(value, key, secret, known)
    if secret and not is_open(key, value):
        text = _defaults_masked(str(value), secret=True)
        return text if text != str(value) and is_reference(text) else MASK
    if looks_secret(key, value):
        return MASK
    if isinstance(value, str):
        return _text_masked(value, known)
    return MASK if value is not None and str(value) in known else value


def _mapping_masked(values: Mapping[Any, Any], secret: bool, known: list[str]) -> dict[Any, Any]:
    masked_values = {}
    for name, item in values.items():
        shown_name = _without(name, known) if isinstance(name, str) else name
        is_secret_item = secret or is_secret(str(name))
        masked_values[shown_name] = _masked(item, str(name), is_secret_item, known)
    return masked_values


def _list_masked(values: list[Any], key: str, secret: bool, known: list[str]) -> list[Any]:
    """Return the items of a list; one that follows a flag may be its secret: [--password, ...]."""
    items = []
    before: Any = ""
    for item in values:
        if isinstance(before, str) and before.startswith("-") and is_secret(before):
            items.append(_masked(item, before, True, known))
        else:
            items.append(_masked(item, key, secret, known))
        before = item
    return items


def masked_words(texts: Iterable[str]) -> list[str]:
    """Return overrides, or arguments of a command, without secrets."""
    known = [*_of_environment(), *_remembered]
    return [_word_masked(text, known) for text in texts]


def _word_masked(text: str, known: list[str]) -> str:
    key, equals, value = text.partition("=")
    name = key.lstrip("+~-")
    inside = any(is_secret(inner) for inner in _INSIDE.findall(value))
    if equals and re.match(r"[\w.@/:-]+$", name) and (inside or hides(name, value)):
        reference = _defaults_masked(value, secret=True)
        return f"{key}={reference if is_reference(reference) else MASK}"
    return _text_masked(text, known)


def hidden(text: str) -> str:
    """Return a text for people, such as a message or a line of a log, without secrets."""
    return _text_masked(text, [*_of_environment(), *_remembered])


def hidden_in(value: Any) -> Any:
    """Return a JSON-like value whose texts are without secrets."""
    if isinstance(value, Mapping):
        return {key: hidden_in(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [hidden_in(item) for item in value]
    return hidden(value) if isinstance(value, str) else value


def is_recorded(text: str) -> bool:
    """Return whether a recorded text is whole: no part of it is masked, or a variable has it."""

    def from_variable(reference: re.Match[str]) -> str:
        return "" if reference[2] in os.environ else reference[0]

    return MASK not in _DEFAULT.sub(from_variable, text)


def remember(values: Iterable[Any]) -> None:
    """Mask these secrets in texts of this process from now on."""
    _remembered.update(dict.fromkeys(_variants(str(value) for value in values)))


def remembered() -> tuple[str, ...]:
    """Return the secrets that another process has to remember too."""
    return tuple(_remembered)


def secrets_in(value: Any, key: str = "", secret: bool = False) -> Iterator[str]:
    """Yield the secrets of plain containers, found by their keys and in URLs."""
    secret = secret or is_secret(key)
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from secrets_in(item, str(name), secret)
    elif isinstance(value, list):
        for item in value:
            yield from secrets_in(item, key, secret)
    elif (secret and not is_open(key, value)) or looks_secret(key, value):
        yield str(value)
    if isinstance(value, str):
        yield from _secrets_in_text(value, secret)


def _secrets_in_text(text: str, secret: bool) -> Iterator[str]:
    """Yield users of URLs, and defaults of references to the environment."""
    for _, user in _URL.findall(text):
        if not _is_open_user("", user):
            yield user
            yield user.partition(":")[2]
    for _, name, default in _DEFAULT.findall(text):
        if not _is_harmless(name, default, secret):
            yield default.strip().strip("'\"")


def _of_environment() -> list[str]:
    """Return the values of environment variables with secret names."""
    return [*_variants(value for name, value in os.environ.items() if hides(name, value))]


def _variants(values: Iterable[str]) -> Iterator[str]:
    """Yield secrets that are long enough to be found in texts, as these may spell them."""
    for value in values:
        if len(value) < 6 or is_ordinary(value):
            continue
        parts = [value, *value.splitlines()] if "\n" in value else [value]
        for part in parts:
            if len(part) < 6 or part == MASK:
                continue
            yield part
            if not part.isalnum():
                yield from {
                    json.dumps(part)[1:-1],
                    json.dumps(part, ensure_ascii=False)[1:-1],
                    repr(part)[1:-1],
                    escape(part),
                    quote(part, errors="replace"),
                    quote(part, safe="", errors="replace"),
                    part.replace("'", "''"),
                    part.replace("'", "'\"'\"'"),
                    part.replace("'", "\\'"),
                } - {part}


def _without(text: str, known: Iterable[str]) -> str:
    secrets = [secret for secret in known if secret in text]
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) < 8:  # such as a word, which may be a part of others
            text = re.sub(rf"(?<![\w-]){re.escape(secret)}(?![\w-])", MASK, text)
        else:
            text = text.replace(secret, MASK)
    return text


def _text_masked(text: str, known: Iterable[str]) -> str:
    """Return a text without known secrets, users of URLs, and values of secret keys in it."""
    text = _without(text, known)
    if "oc.env" in text:
        text = _defaults_masked(text, secret=False)
    if "://" in text:
        text = _URL.sub(_url_masked, text)
        text = _SIGNED.sub(rf"\1{MASK}", text)
    if "=" in text or ":" in text:
        text = _pairs_masked(text)
    if "-" in text:
        text = _FLAG.sub(_flag_masked, text)
    if "B" in text or "uthoriz" in text:
        text = _BEARER.sub(rf"\1\2{MASK}", text)
    return text


def _defaults_masked(text: str, secret: bool) -> str:
    """Mask the defaults of references to the environment; ``secret``: so is the key they are of."""

    def shown(reference: re.Match[str]) -> str:
        before, name, default = reference.groups()
        return reference[0] if _is_harmless(name, default, secret) else f"{before}{MASK}}}"

    return _DEFAULT.sub(shown, text)


def _is_harmless(name: str, default: str, secret: bool) -> bool:
    """Return whether the default of a variable is no secret: a number, a path, a short word."""
    default = default.strip().strip("'\"")
    if default.lower() in ("", "null", "true", "false", MASK) or is_reference(default):
        return True
    if secret or is_secret(name):
        return False
    short = len(default) <= 5 and default.isalnum()
    return short or bool(_NUMBER.fullmatch(default) or PATH.fullmatch(default))


def _url_masked(url: re.Match[str]) -> str:
    scheme, user = url.groups()
    return url[0] if _is_open_user(scheme, user) else f"{scheme}://{MASK}@"


def _is_open_user(scheme: str, user: str) -> bool:
    """Return whether the user part of a URL names somebody, but holds no secret."""
    bare = REFERENCE.sub("", user)
    if bare in ("", ":", MASK):
        return True
    name, colon, _ = bare.partition(":")
    password = user[len(name) + 1 :] if colon and user.startswith(f"{name}:") else ""
    if password:
        return is_reference(password)
    # ``ssh://git@host``, and the container of a storage account
    return not colon and (name == "git" or scheme.lower() in ("abfs", "abfss", "wasb", "wasbs"))


def _pairs_masked(text: str) -> str:
    """Mask the value of each ``key=value`` and ``key: value`` whose key is secret."""
    parts = []
    end = 0
    for pair in _PAIR.finditer(text):
        key, sign, space = pair.groups()
        if pair.start() < end or not (is_secret(key) or is_doubtful(key)):
            continue
        value = _VALUE.match(text, pair.end())
        if value is None or not hides(key, value[0]):
            continue
        quotation = value[0][0] if value[0][0] in "'\"" else ""
        looks_random = len(value[0]) >= 8 and any(letter.isdigit() for letter in value[0])
        if sign.endswith(":") and space and not quotation and not looks_random:
            continue  # a sentence: "token: must be given"
        parts.append(f"{text[end : pair.end()]}{quotation}{MASK}{quotation}")
        end = value.end()
    return "".join(parts) + text[end:]


def _flag_masked(match: re.Match[str]) -> str:
    """Mask the value after a flag, such as ``--password``, if the flag names a secret."""
    flag = match[1]
    value = match[3]
    if value.startswith("-") or not hides(flag.lstrip("-"), value):
        return match[0]
    return f"{flag}{match[2]}{MASK}"
