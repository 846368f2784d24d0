"""Secrets, and values of the environment, are in no file that a command leaves, and not printed."""

import os
import secrets
from pathlib import Path
from unittest.mock import patch

import pytest
import yaml

from runner.cli.main import main
from runner.config.masking import hidden, masked, masked_words
from runner.config.ordinary import show_path
from runner.config.secret import is_secret
from runner.models.cnn import DigitsCNN
from tests.launch.ends import read

pytestmark = pytest.mark.xdist_group("finished")


class Secretive(DigitsCNN):
    """DigitsCNN with arguments that a user would not want to see in a record."""

    def __init__(self, num_classes: int = 10, width: int = 32, **others: object):
        super().__init__(num_classes=num_classes, width=width)
        self.others = others

    def forward(self, images):
        if "***" in self.others.values():
            raise RuntimeError("a mask is no secret")
        return super().forward(images)


SECRET_KEYS = """
api_key apikey apiKey access_key secret_key aws_secret_access_key awsSecretAccessKey private_key
ssh_key signing_key encryption_key account_key openai_key wandb_key api_key_2 password passwd
passphrase db_password user_password db_pass secret client_secret secrets credentials
gcp_credentials token access_token auth_token bearer_token refresh_token github_token gitlab_token
slack_bot_token id_token hf_token hub_token my_token tokenOfMine.token use_auth_token api_tokens
bearer authorization auth cookie webhook connection_string jwt
pass pwd pin sas pem mysql_pwd PGPASSWORD clientsecret sshpass github_pat oauth totp_seed
recovery_code mnemonic seed_phrase tls_key fernet_key client_cert_key passkey hmac
session_token webhook_url x-api-key dsn csrf conn_str connectionString auth_header azure_sas
pin_code activation_code app_key shared_key session_key keypass storepass pw user_pw private_pem
"""
KEYS = SECRET_KEYS.split()
"""Keys whose words say that their value is secret."""

PARTS = [
    "+model.at_{n}=https://{s}@host/x",
    "+model.at_{n}='https://user:{s}@host:80/x?a=b'",
    "+model.at_{n}=postgresql+psycopg2://user:{s}@host/x",
    "+model.at_{n}='see https://{s}:x-oauth-basic@host/x, please'",
    "+model.at_{n}='https://host/x?a=b&access_token={s}'",
    "+model.at_{n}='https://host/x?sv=2024&sig={s}'",
    "+model.at_{n}='${{oc.env:NO_SUCH_NAME,{s}}}'",
    "+model.at_{n}=\"${{oc.env:NO_SUCH_NAME,'{s}'}}\"",
    "+model.at_{n}='x ${{oc.env:NO_SUCH_TOKEN,{s}}} y'",
    "+model.at_{n}={{deep:[{{github_token:{s}}}]}}",
    "+model.at_{n}={{0:cat,password:{s}}}",
    "+model.credentials_{n}.whatever={s}",
    "+model.credentials.of_{n}={{a:b,c:[{s}]}}",
    "+model.at_{n}=[--password,{s}]",
    "+model.at_{n}='Authorization: Bearer {s}9'",
    "+model.at_{n}='curl --token {s} host'",
    '+model.at_{n}=\'{{"api_key":"{s}"}}\'',
    "+model.at_{n}='password={s} host=x'",
    "tracker.tags=['{s}']",  # the value of a variable
    "+hydra.job.env_set.RUNNER_TESTS_{n}={s}",
    "+model.at_{n}='the {s} of GH_TOKEN'",  # the value of a variable
    "+model.at_{n}={{{s}:1}}",  # the value of a variable
    "+model.at_{n}='Authorization: token {s}9'",
    "+model.at_{n}=https://hooks.slack.com/services/T0/B0/{s}",
    "+model.at_{n}=https://discord.com/api/webhooks/1/{s}",
    "+model.at_{n}='https://host/x#id=1&refresh_token={s}'",
    "+model.at_{n}='Server=h;User Id=u;Password={s};'",
    "+model.at_{n}={{s3:{{AccessKeySecret:{s}}}}}",
    "+model.at_{n}=[run,'--api-key={s}']",
    "+model.at_{n}='docker run -e HF_TOKEN={s} image'",
    "+model.at_{n}='{s}, as a value'",  # the value of a variable
    "+model.salt_{n}.salt={s}",
    "+model.at_{n}={{session_id:{s}}}",
    "+model.at_{n}={{pat:[{s}]}}",
    "+model.at_{n}='Cookie: sessionid={s}; csrftoken={s}'",
    "+model.at_{n}='x-api-key: {s}9'",
    "+model.at_{n}='https://host/x?sid={s}'",
]
"""Other ways: the user part of URLs, defaults of variables, texts, values of variables."""

OF_VARIABLES = {
    18: "RUNNER_TESTS_PASSWORD",
    20: "GH_TOKEN",
    21: "RUNNER_API_KEY",
    30: "REDISCLI_AUTH",
}

RECORDED = {
    "direct": "${oc.env:HF_TOKEN}",
    "longer": "https://user:${oc.env:PART}@host/x",
    "under.password": "${oc.env:UNDER_KEY}",
    "api_key": "***",
    "id2label": {0: "cat", 1: "dog"},
}
"""How some overrides of :class:`Planted` are recorded."""


class Planted:
    """Secrets in the environment and in overrides, and the overrides that use them."""

    def __init__(self) -> None:
        names = ("HF_TOKEN", "PART", "UNDER_KEY")
        self.variables = {name: secrets.token_hex(12) for name in names}
        self.words = [
            "model._target_=tests.launch.test_secrets.Secretive",
            "+model.direct='${oc.env:HF_TOKEN}'",
            "+model.longer='https://user:${oc.env:PART}@host/x'",
            "+model.copied='it is ${model.direct}'",
            "+model.under={password:'${oc.env:UNDER_KEY}'}",
            "+model.id2label={0:cat,1:dog}",
        ]
        self.typed = [secrets.token_hex(12) for _ in (*KEYS, *PARTS)]
        for number, (key, secret) in enumerate(zip(KEYS, self.typed, strict=False)):
            section = "model" if number % 2 else "model.others"
            self.words.append(f"+{section}.{key}={secret}")
        for number, (word, secret) in enumerate(zip(PARTS, self.typed[len(KEYS) :], strict=True)):
            self.words.append(word.format(n=number, s=secret))
            if number in OF_VARIABLES:
                self.variables[OF_VARIABLES[number]] = secret
        self.all = [*self.variables.values(), *self.typed]

    def ways_in(self, content: bytes):
        """The secrets that stand in a content, each by its way."""
        ways = dict(zip(self.typed, (*KEYS, *PARTS), strict=True))
        return [ways.get(secret, secret) for secret in self.all if secret.encode() in content]


def leaks(planted, folder: Path):
    """Files in which a planted secret stands, with the ways that it was given."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    leaked = {file.name: planted.ways_in(file.read_bytes()) for file in files}
    return {name: ways for name, ways in leaked.items() if ways}


def test_a_run_leaves_no_secret_in_any_file(single):
    assert len(single.planted.all) >= 60
    assert leaks(single.planted, single.folder) == {}


def test_a_run_prints_no_secret(single):
    assert single.planted.ways_in((single.printed + single.warned).encode()) == []


def test_a_run_records_masks_beside_all_that_is_no_secret(single):
    model = yaml.safe_load((single.folder / "config.yaml").read_text())["model"]
    composed, overrides = (
        yaml.safe_load((single.folder / ".hydra" / f"{name}.yaml").read_text())
        for name in ("config", "overrides")
    )
    for recorded in (model, composed["model"]):
        password = recorded["under"]["password"]
        values = {**recorded["others"], **recorded, "under.password": password}
        assert values.items() >= RECORDED.items()
    assert composed["clip"]["threshold"] == 0.25
    assert "+model.others.api_key=***" in overrides
    saved = read(single.folder / "checkpoints" / "final", "manifest.json")["config"]["model"]
    assert saved["others"] == model["others"]


PRINTS = ["--cfg all", "--cfg all --resolve", "--help model", "--info", "plan seed=no"]
MORE = [
    "--cfg job",
    "--cfg hydra",
    "--help",
    "--info=config",
    "seed=no",
    "-m seed=1,2 sweep.zip=[no]",
]
PRINTS += [pytest.param(words, marks=pytest.mark.slow) for words in MORE]


@pytest.mark.parametrize("words", PRINTS)
def test_nothing_that_is_printed_shows_a_secret(words, capsys, outputs):
    planted = Planted()
    command, *options = words.split()
    with patch.dict(os.environ, planted.variables):
        # A value of a wrong type is quoted by a refusal.
        main([command, *options, *planted.words, f"clip.threshold.password={planted.typed[0]}"])
        main([command, *options, *planted.words])
    said = capsys.readouterr()
    assert "***" in said.out + said.err
    assert planted.ways_in((said.out + said.err).encode()) == []
    assert not outputs.exists()


ORDINARY_KEYS = """
pad_token eos_token bos_token mask_token cls_token class_token image_token decoder_start_token
pad_token_id eos_token_id token_id tokens max_tokens num_tokens tokens_per_sample reg_tokens
additional_special_tokens tokenizer key keys sort_key query_key public_key key_padding_mask
keypoints
monkey author secretary password_file secret_dim forward_pass OLDPWD SSH_AUTH_SOCK passes compass
TOKENIZERS_PARALLELISM id_tokens hf_tokens first_pass pin_memory spin pattern patch oauth_provider
salt salt_and_pepper salt_prob session_id session pat patience signature sigma nonce sid basalt
webhook_timeout auth_mode partition_key root_key hash_buckets
"""
SHOWN = {
    "a": "${oc.env:DATA,/data/x}",
    "b": "${oc.env:RATE,0.1}",
    "c": "${oc.env:DEVICE,auto}",
    "d": "ssh://git@host/x",
    "e": "https://host/x@1.2",
    "f": "abfss://container@account.host/x",
    "use_auth_token": True,
    "token": None,
    "eos_token": "</s>",
    "my_token": 50256,
    "hub": {"token": "cls"},
    "id": {"token": "<|end|>"},
    "cls": {"token": "[CLS]"},
    "api_tokens": 4,
    "PWD": "/home/user@team/x",
    "pass": 2,
    "salt": 0.02,
    "pepper": "black",
    "session": "2024-03-15",
    "session_id": "ses-20240315",
    "pat": "*.png",
    "signature": "serving_default_of_the_model",
    "salt_and_pepper": "package1.transforms.SaltAndPepper",
    "cert": "/etc/ssl/certificate17.pem",
}


def test_what_is_ordinary_is_shown():
    assert [key for key in KEYS if not is_secret(key)] == []
    assert [key for key in ORDINARY_KEYS.split() if is_secret(key)] == []
    assert masked(SHOWN) == SHOWN
    words = [f"+model.{key}={value}" for key, value in SHOWN.items() if not isinstance(value, dict)]
    assert masked_words(words) == words
    text = "token: must be given, and a password: too; loss=0.25 at https://host/x, eos_token=</s>"
    assert hidden(text) == text


def test_a_secret_that_is_a_name_or_stands_in_the_path_of_the_run_hides_neither(tmp_path):
    show_path(tmp_path / "project17")
    shown = {"clip": "adaptive", "threshold": 1, "folder": str(tmp_path / "project17")}
    secret = secrets.token_hex(8)
    names = {"A_TOKEN": "adaptive", "B_TOKEN": "threshold", "C_TOKEN": "project17"}
    with patch.dict(os.environ, {**names, "D_TOKEN": secret}):
        assert masked({**shown, "other": secret}) == {**shown, "other": "***"}
        assert masked({"password": "adaptive"}) == {"password": "***"}
        assert hidden(f"clip=adaptive in {tmp_path}/project17") == (
            f"clip=adaptive in {tmp_path}/project17"
        )


def test_the_advice_to_give_a_secret_again_is_not_masked():
    advice = "is a secret, which is not recorded: give it again (model.password=???)"
    assert hidden(advice) == advice


@pytest.mark.parametrize("word", ["ab", "-a", "a.", "1a", "${a}", "a://"])
def test_a_long_word_of_a_message_is_read_in_one_go(word):
    """With a pattern that starts anew at each letter this takes hours, until the test times out."""
    text = f"cannot decode {word * 100_000}, see https://host/page"
    assert hidden(text) == text
