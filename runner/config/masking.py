"""Decide what is secret, and mask it in containers, in overrides and in texts.

Secret are the value of a key whose words say so (:func:`is_secret`), a value that looks random
under a key such as ``salt`` or ``session_id`` (:func:`hides`), the user part of a URL, the default
of ``${oc.env:NAME,DEFAULT}``, what ``hydra.job.env_set`` sets, and the value of an environment
variable with a secret name, wherever it stands. A reference such as ``${oc.env:TOKEN}`` is no
secret. Secrets that this process has read (:func:`remember`) are masked in all texts, unless one is
equal to a name or a path of this program (`ordinary.py`).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from html import escape
from typing import Any
from urllib.parse import quote

from runner.config.ordinary import is_ordinary

MASK = "***"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# At the end of a key: which of several secrets it is, and what is no secret but about one.
_WHICH = {"value", "text", "string", "str", "raw", "b64", "base64", "prod", "dev", "old", "new"}
_ABOUT = re.compile(
    r"file|path|dir|folder|names?|ids?|length|len|size|count|types?|policy|env|var|field|format"
    r"|prefix|expiry|ttl|required|enabled|hint|manager|store|provider|index|idx|sock|version"
    r"|dim|rate|prob|weight|loss|layers?|width|depth|heads|embeddings?|limit"
    r"|timeout|seconds|interval|retries|port|host|mode|method|scheme"
)
_ALWAYS = re.compile(
    r"(passwords?|passwd|passphrases?|secrets?)(_|$)"  # also PGPASSWORD, clientsecret
    r"|(^|_)(passcode|credentials?|creds|bearer|authorization|cookies?|jwt|webhook|env_set|t?otp"
    r"|(recovery|backup|activation)_codes?|mnemonic|seed_(phrase|words)|pin_?code|dsn|auth_header"
    r"|csrf|xsrf|conn(ection)?str(ing)?"
    r"|(api|access|secret|private|auth|encryption|decryption|signing|account|master|service"
    r"|licen[sc]e|ssh|ssl|tls|cert|client|rsa|pgp|gpg|hmac|aes|fernet|deploy|storage|subscription"
    r"|app|application|admin|shared|session|wallet|cookie|jwt"
    r"|pass|openai|anthropic|wandb|hf|aws|azure|google|github|gitlab|kaggle|comet|neptune)_?keys?"
    r"|(db|user|smtp|mysql|redis|ftp|http|proxy|login|mail|pg|postgres|root|admin|key|store|keystore"
    r"|ssh|sudo)"
    r"_?pass)(_|$)"
    r"|(^|_)(o?auth|hmac|pswd|passw|pword)$|._(pwd|pat|pw|sas|pem)$"
)
# A key that is one of these words and no more, unless its value is a path or a small number.
_SHORT = ("pass", "pwd", "pw", "pin", "sas", "pem")
# A key with this end may be secret or ordinary: its value decides.
_DOUBTFUL = re.compile(
    r"(^|_)(salt|pat|cert|certificate|sig|signature|nonce|sid|(php)?sessid"
    r"|j?session(_?id|_?hash)?)$|^pepper$"
)
_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w+/=.~$:%-]{16,}")
_LOGINS = (
    "access|api|auth|bearer|refresh|session|secret|github|gitlab|hub|hf|wandb|bot|id|csrf|xsrf"
    "|oauth|oauth2|bearer|security|service|personal|deploy|job"
)
_LOGIN_TOKEN = re.compile(
    rf"(^|_)(({_LOGINS})_?token|(access|api|auth|bearer|refresh|session|secret)_?tokens)$"
)
# Before ``token``: it is one of a vocabulary, or counted.
_OF_MODELS = re.compile(
    r"(^|_)(bos|eos|pad|padding|unk|unknown|sep|separator|cls|class|masked|mask|start|end|stop"
    r"|begin|sot|eot|boi|eoi|special|image|img|video|audio|vision|visual|text|prompt|query|num|n"
    r"|max|min|per|next|last|first|prev|previous|extra|additional|added|add|registers?|reg|dist"
    r"|distillation|distill|newline|blank|decoder|encoder|fill|ignore|vocab|vocabulary|each|single"
    r"|one|every|input|output|target|label|task|current|learned|learnable|latent|memory|state"
    r"|summary|global|local|patch|position|pooled|pool|context|time|word|char|byte|sub|drop"
    r"|dropped|keep|box|point|object|frame|experts?|routed|router)_"
)
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE)
_PATH = re.compile(r"(\.{0,2}|~|\$\w+)/[^@]*")
# What ``token`` is in a vocabulary: a number, the name of a special token, or one in brackets.
_OF_VOCABULARY = re.compile(
    r"\d{1,6}|cls|sep|pad|bos|eos|unk|mask|\[\w+\]|<[/|\w]+>", re.IGNORECASE
)

# An interpolation without others inside, or with some that have none.
_INNER = r"\$\{[^${}]*\}"
_REFERENCE = re.compile(rf"\$\{{((?:{_INNER}|[^${{}}])*)\}}")
_DEFAULT = re.compile(
    r"(\$\{\s*oc\.env\s*:\s*([^,{}\s]+)\s*,)"
    rf"((?:'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|{_INNER}|[^{{}}'\"])*)\}}"
)
# No pattern starts anew inside of a long word: the time would grow with its square.
_URL = re.compile(r"([\w+.-]{0,30})://((?:\$\{[^{}]*\}|(?!\$\{)[^\s/?#'\"<>])+)@")
_SIGNED = re.compile(
    r"([?&](?:sig|signature|key|x-(?:amz|goog)-signature)="
    r"|hooks\.slack\.com/services/|/api/webhooks/)[^\s&#'\"]+",
    re.IGNORECASE,
)
_QUOTED = r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\""
_VALUE = re.compile(rf"{_QUOTED}|{_REFERENCE.pattern}|[^\s,;&|)}}\]'\"]+")
_PAIR = re.compile(r"(?<![\w.-])([\w.-]+)(['\"]?\s*=\s*|['\"]?:)(\s*)")
_FLAG = re.compile(rf"(?<![\w-])(--?[A-Za-z][\w-]*)(['\"]?(?:\s+|\s*,\s*))({_VALUE.pattern})")
_LOGIN = r"Bearer|Basic|[Aa]uthorization['\"]?\s*[:=]\s*['\"]?\w+"
_BEARER = re.compile(rf"\b({_LOGIN})(\s+)(?=[\w.~+/=-]*[\d=])[\w.~+/=-]{{6,}}")
_INSIDE = re.compile(r"[{,]\s*['\"]?([\w.@/-]+)['\"]?\s*:")  # a key of a mapping in an override

_remembered: dict[str, None] = {}


@lru_cache(maxsize=4096)
def is_secret(key: str) -> bool:
    """Return whether the words of a dotted key, or of a variable, say that its value is secret."""
    return any(_names_secret(part) for part in re.split(r"[.@/:]", key))


def _names_secret(name: str) -> bool:
    words = [word.lower() for word in _WORD.findall(name)]
    if len(words) > 1 and words[-2] in ("conn", "connection") and words[-1] in ("str", "string"):
        return True
    while words and (words[-1].isdecimal() or words[-1] in _WHICH):
        words.pop()
    if not words or _ABOUT.fullmatch(words[-1]):
        return False
    joined = "_".join(words)
    if joined in _SHORT:
        return True
    if _ALWAYS.search(joined) or _LOGIN_TOKEN.search(joined):
        return True
    return words[-1] == "token" and not _OF_MODELS.search(joined)


@lru_cache(maxsize=4096)
def _is_doubtful(key: str) -> bool:
    """Return whether the value of a dotted key is secret if it looks random: ``salt``, ``sig``."""
    name = re.split(r"[.@/:]", key)[-1]
    words = [word.lower() for word in _WORD.findall(name)]
    return _DOUBTFUL.search("_".join(words)) is not None


def hides(key: str, value: Any) -> bool:
    """Return whether the value of this key must not be shown."""
    if is_secret(key):
        return not _is_open(key, value)
    return _looks_secret(key, value)


def _looks_secret(key: str, value: Any) -> bool:
    """Return whether a doubtful key has a value of 16 or more letters and digits, and no path."""
    if not _is_doubtful(key) or not isinstance(value, str):
        return False
    text = value.strip().strip("'\"")
    return _RANDOM.fullmatch(text) is not None and not _PATH.fullmatch(text)


def _is_open(key: str, value: Any) -> bool:
    """Return whether a value is none, even under a secret key: null, a flag, or a reference."""
    if value is None or isinstance(value, bool):
        return True
    text = str(value).strip()
    if text.lower() in ("", "null", "none", "true", "false", "''", '""', "???", MASK):
        return True
    last = re.split(r"[.@/:]", key.lower())[-1]
    if last.endswith(("token", "tokens")) and _OF_VOCABULARY.fullmatch(text):
        return True
    if last in _SHORT and (_PATH.match(text) or re.fullmatch(r"\d{1,3}", text)):
        return True
    return _is_reference(text)


def _is_reference(text: str) -> bool:
    """Return whether a text refers to a value elsewhere, and holds none itself."""
    if text[:1] in "'\"" and text[-1:] == text[:1]:
        text = text[1:-1]
    found = _REFERENCE.fullmatch(text.strip())
    if found is None:
        return False
    resolver, colon, arguments = found[1].partition(":")
    if not colon:
        return True
    first, comma, default = (part.strip() for part in arguments.partition(","))
    if resolver.strip() == "oc.decode":
        return _is_reference(arguments)
    is_open = not comma or default in ("null", MASK) or _is_reference(default)
    return resolver.strip() == "oc.env" and re.fullmatch(r"\w+", first) is not None and is_open


def masked(value: Any, key: str = "", known: Iterable[str] = ()) -> Any:
    """Return plain containers, references unresolved, without secrets.

    Secrets are found by the keys, and ``key`` is that of ``value`` itself; and by their text:
    values of the environment, and those of ``known``.
    """
    return _masked(value, str(key), is_secret(str(key)), [*_variants(known), *_of_environment()])


def _masked(value: Any, key: str, secret: bool, known: list[str]) -> Any:
    if isinstance(value, Mapping):
        return {
            _without(name, known) if isinstance(name, str) else name: _masked(
                item, str(name), secret or is_secret(str(name)), known
            )
            for name, item in value.items()
        }
    if isinstance(value, list):
        items, before = [], ""
        for item in value:
            flagged = before.startswith("-") and is_secret(before)  # [--password, ...]
            items.append(_masked(item, before if flagged else key, secret or flagged, known))
            before = item if isinstance(item, str) else ""
        return items
    if secret and not _is_open(key, value):
        text = _defaults_masked(str(value), secret=True)
        return text if text != str(value) and _is_reference(text) else MASK
    if _looks_secret(key, value):
        return MASK
    if isinstance(value, str):
        return _text_masked(value, known)
    return MASK if value is not None and str(value) in known else value


def masked_words(words: Iterable[str]) -> list[str]:
    """Return overrides, or arguments of a command, without secrets."""
    known = [*_of_environment(), *_remembered]
    return [_word_masked(word, known) for word in words]


def _word_masked(word: str, known: list[str]) -> str:
    key, equals, value = word.partition("=")
    name = key.lstrip("+~-")
    inside = any(is_secret(inner) for inner in _INSIDE.findall(value))
    if equals and re.match(r"[\w.@/:-]+$", name) and (inside or hides(name, value)):
        text = _defaults_masked(value, secret=True)
        return f"{key}={text if _is_reference(text) else MASK}"
    return _text_masked(word, known)


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

    def from_variable(found: re.Match[str]) -> str:
        return "" if found[2] in os.environ else found[0]

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
    elif (secret and not _is_open(key, value)) or _looks_secret(key, value):
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
    for secret in sorted((one for one in known if one in text), key=len, reverse=True):
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
    return _BEARER.sub(rf"\1\2{MASK}", text) if "B" in text or "uthoriz" in text else text


def _defaults_masked(text: str, secret: bool) -> str:
    def shown(found: re.Match[str]) -> str:
        before, name, default = found.groups()
        return found[0] if _is_harmless(name, default, secret) else f"{before}{MASK}}}"

    return _DEFAULT.sub(shown, text)


def _is_harmless(name: str, default: str, secret: bool) -> bool:
    """Return whether the default of a variable is no secret: a number, a path, a short word."""
    default = default.strip().strip("'\"")
    if default.lower() in ("", "null", "true", "false", MASK) or _is_reference(default):
        return True
    if secret or is_secret(name):
        return False
    short = len(default) <= 5 and default.isalnum()
    return short or bool(_NUMBER.fullmatch(default) or _PATH.fullmatch(default))


def _url_masked(found: re.Match[str]) -> str:
    scheme, user = found.groups()
    return found[0] if _is_open_user(scheme, user) else f"{scheme}://{MASK}@"


def _is_open_user(scheme: str, user: str) -> bool:
    """Return whether the user part of a URL names somebody, but holds no secret."""
    bare = _REFERENCE.sub("", user)
    if bare in ("", ":", MASK):
        return True
    name, colon, _ = bare.partition(":")
    password = user[len(name) + 1 :] if colon and user.startswith(f"{name}:") else ""
    if password:
        return _is_reference(password)
    # ``ssh://git@host``, and the container of a storage account
    return not colon and (name == "git" or scheme.lower() in ("abfs", "abfss", "wasb", "wasbs"))


def _pairs_masked(text: str) -> str:
    """Mask the value of each ``key=value`` and ``key: value`` whose key is secret."""
    parts, end = [], 0
    for found in _PAIR.finditer(text):
        key, sign, space = found.groups()
        if found.start() < end or not (is_secret(key) or _is_doubtful(key)):
            continue
        value = _VALUE.match(text, found.end())
        if value is None or not hides(key, value[0]):
            continue
        quotation = value[0][0] if value[0][0] in "'\"" else ""
        looks_random = len(value[0]) >= 8 and any(letter.isdigit() for letter in value[0])
        if sign.endswith(":") and space and not quotation and not looks_random:
            continue  # a sentence: "token: must be given"
        parts.append(f"{text[end : found.end()]}{quotation}{MASK}{quotation}")
        end = value.end()
    return "".join(parts) + text[end:]


def _flag_masked(found: re.Match[str]) -> str:
    flag, sign, value = found[1], found[2], found[3]
    if value.startswith("-") or not hides(flag.lstrip("-"), value):
        return found[0]
    return f"{flag}{sign}{MASK}"
