"""Laws of masking: what looks like a secret is never shown, and what is none stays readable."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diagnostics.environments.masking import MASK, masked, masked_command, masked_variable

SECRETS = (
    "hunter2secret", "hf_AbCdEfGhIjKlMnOpQrStUvWx", "ghp_0123456789abcdefghijABCDEFGHIJ012345", "sk-proj-abcdefghijklmnop",
    "0123456789abcdef0123456789abcdef01234567", "AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc",
)  # fmt: skip


@pytest.mark.parametrize("secret", SECRETS)
@pytest.mark.parametrize(
    "text",
    ["https://user:{}@host.example/simple/", "https://{}@github.com/o/r.git", "me:{}@host.example:o/r.git",
     "remote x:{}@host:r", "https://h/x?token={}&n=1", "API_KEY={}",
     "--hf-token {} --steps 3", "--password={}", "Authorization: Bearer {}", '{{"api_key": "{}"}}', "x --wandb-api-key '{}'"],
)  # fmt: skip
def test_a_secret_where_secrets_stand_is_masked(text: str, secret: str) -> None:
    shown = masked(text.format(secret))
    assert secret not in shown
    assert MASK in shown


@pytest.mark.parametrize("secret", SECRETS[1:])
def test_a_token_is_masked_wherever_it_stands(secret: str) -> None:
    assert secret not in masked(f"python train.py {secret} end")
    assert secret not in masked_variable("TORCH_LOGS", f"dynamo,{secret}")


@settings(deadline=None)
@given(st.text("abcdefghijklmnopqrstuvwxyz0123456789!%", min_size=3))
def test_a_variable_with_a_secret_name_shows_nothing_of_its_value(value: str) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "SSH_KEY"):
        assert masked_variable(name, value) == MASK


@pytest.mark.parametrize(
    "text",
    ["TOKENIZERS_PARALLELISM=false", "tokens_per_second=21500.5", "expandable_segments:True", "/opt/pypi-more/simple",
     "git@github.com:o/r.git", "at 12:30 git@host:r",
     "/usr/lib/x86_64-linux-gnu:/usr/local/cuda-12.8/lib64", "GPU-08f3e30a-8a10-0135-bada-13f71feaef21,1",
     "/data/Projects2/some/long/folder/of/caches/abc", "git+https://github.com/o/r@v1.0",
     "python -m dflash train --steps 30 --max-tokens 512", "570.124.06"],
)  # fmt: skip
def test_what_is_no_secret_stays(text: str) -> None:
    assert masked(text) == text


def test_the_home_folder_names_no_user() -> None:
    assert masked(f"{Path.home()}/cache:{Path.home()}") == "~/cache:~"


def test_a_command_line_is_shown_without_its_secrets() -> None:
    assert masked_command(["run", "--token", "abc def", "--n", "3"]) == f"run --token {MASK} --n 3"


@pytest.mark.timeout(300)
@pytest.mark.parametrize("part", ["a", "a-", "://a", "eyJ", "A1a", "token", "--token=", "=a", " "])
def test_a_variable_of_the_greatest_length_is_read_in_seconds(part: str) -> None:
    masked((part * 131_072)[:131_072])  # quadratic expressions take hours


@pytest.mark.parametrize(
    ("name", "value"),
    [("PYTORCH_CRED", "plant"), ("TORCH_PWD", "plant"), ("HF_X", "a -----BEGIN RSA PRIVATE KEY-----\nplant\n")],
)
def test_keys_and_credentials_of_shorter_names_are_masked(name: str, value: str) -> None:
    assert "plant" not in masked_variable(name, value)
