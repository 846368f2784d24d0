"""Decide by a key and its value what is secret.

Secret are the value of a key whose words say so (:func:`is_secret`), and a value that looks random
under a key such as ``salt`` or ``session_id`` (:func:`hides`). A reference such as
``${oc.env:TOKEN}`` is no secret.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

MASK = "***"

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
_CONNECTION = ("conn_str", "conn_string", "connection_str", "connection_string")
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
PATH = re.compile(r"(\.{0,2}|~|\$\w+)/[^@]*")
# What ``token`` is in a vocabulary: a number, the name of a special token, or one in brackets.
_OF_VOCABULARY = re.compile(
    r"\d{1,6}|cls|sep|pad|bos|eos|unk|mask|\[\w+\]|<[/|\w]+>", re.IGNORECASE
)

# An interpolation without others inside, or with some that have none.
INNER = r"\$\{[^${}]*\}"
REFERENCE = re.compile(rf"\$\{{((?:{INNER}|[^${{}}])*)\}}")


@lru_cache(maxsize=4096)
def is_secret(key: str) -> bool:
    """Return whether the words of a dotted key, or of a variable, say that its value is secret."""
    return any(_names_secret(part) for part in re.split(r"[.@/:]", key))


def _names_secret(name: str) -> bool:
    """Return whether one part of a dotted key says that its value is secret."""
    words = _words_of(name)
    if "_".join(words[-2:]) in _CONNECTION:
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
def is_doubtful(key: str) -> bool:
    """Return whether the value of a dotted key is secret if it looks random: ``salt``, ``sig``."""
    name = re.split(r"[.@/:]", key)[-1]
    return _DOUBTFUL.search("_".join(_words_of(name))) is not None


def _words_of(name: str) -> list[str]:
    """Return the words of a name in small letters: ``hub``, ``api``, ``key`` of ``hubApiKey``."""
    return [word.lower() for word in _WORD.findall(name)]


def hides(key: str, value: Any) -> bool:
    """Return whether the value of this key must not be shown."""
    if is_secret(key):
        return not is_open(key, value)
    return looks_secret(key, value)


def looks_secret(key: str, value: Any) -> bool:
    """Return whether a doubtful key has a value of 16 or more letters and digits, and no path."""
    if not is_doubtful(key) or not isinstance(value, str):
        return False
    text = value.strip().strip("'\"")
    return _RANDOM.fullmatch(text) is not None and not PATH.fullmatch(text)


def is_open(key: str, value: Any) -> bool:
    """Return whether a value is none, even under a secret key: null, a flag, or a reference."""
    if value is None or isinstance(value, bool):
        return True
    text = str(value).strip()
    if text.lower() in ("", "null", "none", "true", "false", "''", '""', "???", MASK):
        return True
    last = re.split(r"[.@/:]", key.lower())[-1]
    if last.endswith(("token", "tokens")) and _OF_VOCABULARY.fullmatch(text):
        return True
    if last in _SHORT and (PATH.match(text) or re.fullmatch(r"\d{1,3}", text)):
        return True
    return is_reference(text)


def is_reference(text: str) -> bool:
    """Return whether a text refers to a value elsewhere, and holds none itself."""
    if text[:1] in "'\"" and text[-1:] == text[:1]:
        text = text[1:-1]
    reference = REFERENCE.fullmatch(text.strip())
    if reference is None:
        return False
    resolver, colon, arguments = reference[1].partition(":")
    if not colon:
        return True
    first, comma, default = (part.strip() for part in arguments.partition(","))
    if resolver.strip() == "oc.decode":
        return is_reference(arguments)
    is_open = not comma or default in ("null", MASK) or is_reference(default)
    return resolver.strip() == "oc.env" and re.fullmatch(r"\w+", first) is not None and is_open
