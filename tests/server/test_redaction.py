"""Secrets go, everything else stays."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from k25lib.redaction import is_secret, redact, redact_tree

SECRET = "s3cr3tValue-9"


@pytest.mark.parametrize(
    "text",
    [
        f"vllm serve m --api-key {SECRET} --port 80",
        f"vllm serve m --api-key={SECRET}",
        f"vllm serve m --api-key first {SECRET} --port 80",
        f"vllm serve m --hf-token {SECRET}",
        f"vllm serve m --api-key '{SECRET}'",
        f"--ssl-keyfile-password {SECRET}",
        f"non-default args: {{'port': 8000, 'api_key': ['{SECRET}'], 'model': 'x'}}",
        f"non-default args: {{'api_key': ['a', '{SECRET}'], 'hf_token': '{SECRET}'}}",
        f"['vllm', 'serve', '--api-key', '{SECRET}', '--port', '80']",
        f'["--api-key", "{SECRET}"]',
        f"HF_TOKEN={SECRET} vllm serve",
        f"export VLLM_API_KEY='{SECRET}'",
        f"docker run -e HUGGING_FACE_HUB_TOKEN={SECRET} vllm",
        f"AWS_SECRET_ACCESS_KEY={SECRET}",
        f"http://user:{SECRET}@host:8000/v1",
        f"http://{SECRET}@host:8000/v1",
        f"https://host/v1?api_key={SECRET}&x=1",
        f"https://host/v1?token={SECRET}",
        f"Authorization: Bearer {SECRET}",
        f'{{"Authorization": "Bearer {SECRET}"}}',
        f"X-Api-Key: {SECRET}",
        f'{{"password": "{SECRET}"}}',
        f"curl -u me:{SECRET} http://x",
        f"sshpass -p {SECRET} ssh x",
        "token hf_abcdefghijklmnopqrstuvwxyz123456 was refused",
        "key sk-abcdefghijklmnop1234 was refused",
        f"-----BEGIN OPENSSH PRIVATE KEY-----\n{SECRET}\n-----END OPENSSH PRIVATE KEY-----",
        f"Environment=VLLM_API_KEY={SECRET}",
        f"VLLM_API_KEY: {SECRET}",
        f"vllm serve m --hf-token={SECRET}",
        f"vllm serve m --api-key {SECRET} >> /log 2>&1",
        f"vllm serve m --api-key ab,{SECRET}",
        f"""vllm serve m --api-key 'it'"'"'s {SECRET}'""",
        f"sh -c \"vllm serve m --api-key '{SECRET}' --port 1\"",
        f"https://user:p@{SECRET}@host/x",
        f"https://h/v1?x=1&key={SECRET}",
        f"https://h/x?X-Amz-Signature={SECRET}",
        f"Authorization: {SECRET}",
        f"Authorization: Basic first {SECRET}",
        f"curl -H 'authorization: Token {SECRET}' h",
        f"Cookie: session={SECRET}",
        f"docker run -e KEY={SECRET} image",
        f"docker run --env='OPENAI_KEY={SECRET}' image",
        f"PGPASSWORD={SECRET}",
        f"MYSQL_PWD={SECRET} DB_PASS=x",
        f"""--extra '{{"headers": {{"Authorization": "Bearer {SECRET}"}}}}'""",
        f'--extra "{{\\"api_key\\": \\"{SECRET}\\"}}"',
        f"api_key=('{SECRET}',)",
        f"ProfilerConfig(api_key='{SECRET}')",
        f"the API key: {SECRET}",
    ],
)
def test_a_secret_goes(text):
    shown = redact(text)
    assert "***" in shown
    for secret in (SECRET, "abcdefghijklmnop"):
        assert secret not in shown
    assert redact(shown) == shown


@pytest.mark.parametrize(
    "text",
    [
        "vllm serve m --max-num-batched-tokens 8192 --tokenizer-mode auto --tokenizer x",
        "{'max_num_batched_tokens': 8192, 'api_key': None, 'tokenizer': '/models/x', 'hf_token': None}",
        "prompt_tokens=128 output_tokens: 64 max_tokens=1",
        '{"usage": {"prompt_tokens": 4, "completion_tokens": 20, "total_tokens": 24}}',
        "GPU KV cache size: 648,032 tokens",
        "http://127.0.0.1:8000/v1/models",
        "set K25_API_KEY in the environment",
        "token: the smallest unit of text",
        "a basic check of 3 things, bearer of news",
        "generation throughput: 38.5 tokens/s, Running: 0 reqs",
        "stop_token_ids=[1, 2], special_tokens: 12345678",
        "http://h:8000/v1?mail=a@b",
        "asks for an API key: set K25_API_KEY in the environment",
        "PWD=/root/x sort_key=name first_pass=3",
    ],
)
def test_the_rest_stays(text):
    assert redact(text) == text


def test_own_environment(monkeypatch):
    monkeypatch.setenv("K25_API_KEY", "correct horse")
    assert redact("it said correct horse, and no more") == "it said ***, and no more"


def test_trees():
    tree = {
        "command": ["vllm", "serve", "--api-key", "one", "two", "--port", "80"],
        "env": {"HF_TOKEN": "abc", "HOME": "/root"},
        "counts": {"output_tokens": 64, "max_tokens": 128},
        "api_key": None,
        "note": "Bearer abc123def",
    }
    assert redact_tree(tree) == {
        "command": ["vllm", "serve", "--api-key", "***", "***", "--port", "80"],
        "env": {"HF_TOKEN": "***", "HOME": "/root"},
        "counts": {"output_tokens": 64, "max_tokens": 128},
        "api_key": None,
        "note": "Bearer ***",
    }
    assert redact_tree(redact_tree(tree)) == redact_tree(tree)


def test_what_follows_a_secret_in_a_command_stays():
    command = f"cd . && nohup vllm serve m --api-key {SECRET} >> log 2>&1 < /dev/null & echo $!"
    assert redact(command) == command.replace(SECRET, "***")


def test_names():
    assert all(map(is_secret, ["--api-key", "HF_TOKEN", "aws_secret_access_key", "password", "--hf-token"]))
    assert not any(map(is_secret, ["--max-num-batched-tokens", "output_tokens", "tokenizer", "keys", "token_ids"]))


@given(st.text(max_size=200))
def test_any_text_can_be_redacted_and_once_is_enough(text):
    once = redact(text)
    assert redact(once) == once


@pytest.mark.parametrize("levels", [0, 1, 2])
@pytest.mark.parametrize(
    "text",
    [
        "vllm serve m --api-key 'hunter two' --port 80",
        "env VLLM_API_KEY='hunter two' vllm serve m",
        "env 'VLLM_API_KEY=hunter two' vllm serve m",
        "docker run -e 'HF_TOKEN=hunter two' image",
        "sshpass -p 'hunter two' ssh host",
        '{"api_key": "hunter two"}',
    ],
)
def test_a_secret_inside_quoted_commands_goes_with_its_quotes(text, levels):
    for _ in range(levels):
        text = f"ssh host {shlex.quote(text)}"
    shown = redact(text)
    assert "hunter" not in shown and "two" not in shown
    assert "***" in shown and shown.startswith(text[:8])
