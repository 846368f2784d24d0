import pytest

from runner.config import secrets
from runner.config.secrets import MASK, hide, is_secret, masked, masked_words

SECRET = """HF_TOKEN hf_token token auth_token accessToken api_key apiKey APIKEY password
WANDB_API_KEY DB_PASSWORD PGPASSWORD
client_secret secret_key credentials passphrase privateKey jwt api_tokens"""
OPEN = """PWD OLDPWD pad_token mask_token max_tokens tokens token_id tokens_per_sample key keys
label_key sort_key monkey author secretary password_file train.max_duration"""


@pytest.fixture(autouse=True)
def _knows_nothing(monkeypatch):
    monkeypatch.setattr(secrets, "_secrets", {})
    monkeypatch.setattr(secrets, "_values", {})


def test_a_name_says_whether_it_is_a_secret():
    names = SECRET.split() + OPEN.split()
    assert [name for name in names if is_secret(name)] == SECRET.split()
    assert all(is_secret(f"model.{name}") for name in SECRET.split())


@pytest.mark.parametrize(
    ("typed", "recorded"),
    [
        ("model.api_key=abc", "model.api_key=***"),
        ("++model.api_key='a b'", "++model.api_key=***"),
        ("model.token=a,b", "model.token=***"),
        ("+model={api_key:abc,width:3}", "+model=***"),
        ("model.token='${oc.env:ANY}'", "model.token='${oc.env:ANY}'"),
        ("model.token='${oc.env:ANY,abc}'", "model.token=${oc.env:ANY,***}"),
        ("model.token='${oc.env:ANY,null}'", "model.token='${oc.env:ANY,null}'"),
        ("model.token='Bearer ${oc.env:ANY}'", "model.token=***"),
        ("model.x='${oc.env:HF_TOKEN,abc}'", "model.x=${oc.env:HF_TOKEN,***}"),
        ("model.x='${oc.env:HF_TOKEN,${oc.env:ANY,abc}}'", None),
        ("model.x='${oc.env:ANY,abc}'", "model.x='${oc.env:ANY,abc}'"),
        ("model.token=null", "model.token=***"),
        ("model.width=3", "model.width=3"),
        ("~model.token", "~model.token"),
        ("-m", "-m"),
    ],
)
def test_an_override_is_recorded(typed, recorded):
    recorded = recorded or "model.x=${oc.env:HF_TOKEN,${oc.env:ANY,***}}"
    assert masked_words([typed]) == [recorded]
    assert masked_words([recorded]) == [recorded]


def test_values_below_a_secret_key_are_masked():
    content = {"credentials": {"user": "me", "ids": [1, "x"]}, "token": None, "auth": True, "w": 3}
    kept = {"token": None, "auth": True, "w": 3}
    assert masked(content) == {"credentials": {"user": MASK, "ids": [MASK, MASK]}, **kept}


def test_a_message_quotes_no_secret():
    assert secrets.learn_secrets({"a": {"password": 'it\'s a "secret"'}, "width": "not secret"})
    secrets.learn_environment({"HF_TOKEN": "abcdef", "HOST": "machine-of-mine", "HOME": "/tmp"})
    for text in ('it\'s a "secret"', repr('it\'s a "secret"'), '"it\'s a \\"secret\\""'):
        assert "secret" not in hide(text)
    assert (
        hide("abcdef on machine-of-mine in /tmp") == "${oc.env:HF_TOKEN} on ${oc.env:HOST} in /tmp"
    )
    assert hide("abcdef on machine-of-mine", values=False).endswith(" on machine-of-mine")
    assert hide("not secret") == "not secret"
    secrets.learn_secrets({"token": "the"})  # short texts are left
    secrets.learn_environment({"MODE": "norm", "API_KEY": "is"})
    assert hide("the norm is 3") == "the norm is 3"
