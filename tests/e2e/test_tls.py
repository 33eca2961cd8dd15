"""A whole stack with certificates: it serves, its blocks cross encrypted, and whoever has none of its authority's
certificates is refused by every service, even with the right token."""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from openai import OpenAI

from biphase.rpc.token import ServiceToken
from biphase.rpc.trust import Trust
from biphase.rpc.v1 import node_pb2, node_pb2_grpc
from tests.e2e.stack import Stack, running_stack
from tests.security.authority import Authority, Issued
from tests.tiny_models import save_tiny
from tests.tiny_tokenizer import MODEL_VOCAB_SIZE, save_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SECRET = "what every process of this cluster has"
TOKEN = ServiceToken(SECRET)
WORKERS = ("prefill", "decode", "kvstore")
# Whether a prompt is handed off shall not depend on how quick this machine is; the blocks go where TLS is.
FLAGS = ("--served-model-name", "tiny", "--num-blocks", "256", "--prefill-args=--transports tcp",
         "--decode-args=--transports tcp --max-slow-local-tokens 0", "--log-format", "json",
         "--service-token", SECRET)  # fmt: skip


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("pki") / "ours")


@pytest.fixture(scope="module")
def member(authority: Authority) -> Issued:
    return authority.issue("member")


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, authority: Authority, member: Issued) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("model")
    model = save_tokenizer(save_tiny("llama", folder, vocab_size=MODEL_VOCAB_SIZE, max_position_embeddings=2048))
    template = "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    with running_stack(str(model), *FLAGS, "--chat-template", template, *member.flags(authority.ca)) as stack:
        yield stack


def addresses(stack: Stack) -> dict[str, str]:
    """Role -> where its gRPC listens, as it says in its log."""
    lines = [json.loads(line[line.index("{") :]) for line in stack.log().splitlines() if line.endswith("}")]
    return {line["role"]: line["address"] for line in lines if line["event"] == "ready" and line.get("role") in WORKERS}


def info(address: str, trust: Trust) -> Any:
    with contextlib.closing(trust.blocking_channel(address)) as channel:
        stub: Any = node_pb2_grpc.NodeStub(channel)
        return stub.GetInfo(node_pb2.GetInfoRequest(), timeout=3)


def test_chat_over_encrypted_blocks(stack: Stack) -> None:
    with OpenAI(base_url=f"{stack.base_url}/v1", api_key="EMPTY") as client:
        for number in range(8):
            question: Any = [{"role": "user", "content": f"{number} " + "the quick brown fox " * 40}]
            asked = {"model": "tiny", "messages": question, "max_tokens": 12, "temperature": 0}
            whole = client.chat.completions.create(**asked)
            chunks = client.chat.completions.create(**asked, stream=True)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
            assert whole.usage is not None and whole.usage.completion_tokens == 12
    # Decode leaves a prefill worker that lets it wait: not necessarily all of them.
    crossed = [entry for entry in stack.status()["requests"] if entry["num_transferred_tokens"]]
    assert crossed and {entry["transport"] for entry in crossed} == {"tcp"}, stack.status()["requests"]


@pytest.mark.parametrize("role", WORKERS)
def test_who_has_no_certificate_of_the_authority_is_refused(
    stack: Stack, role: str, authority: Authority, member: Issued, tmp_path_factory: pytest.TempPathFactory
) -> None:
    address = addresses(stack)[role]
    assert info(address, Trust(TOKEN, member.tls(authority.ca))).role == role
    strangers = Authority(tmp_path_factory.mktemp("pki") / "theirs")
    for tls in (None, strangers.issue("stranger").tls(authority.ca)):
        with pytest.raises(grpc.RpcError) as refused:
            info(address, Trust(TOKEN, tls))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_plain_reader_of_blocks_is_cut_off(stack: Stack, role: str, authority: Authority, member: Issued) -> None:
    told = info(addresses(stack)[role], Trust(TOKEN, member.tls(authority.ca)))
    host, _, port = told.endpoint.tcp_address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=10) as plain:
        plain.sendall(b"BPH1" + bytes(60))
        received = b""
        try:
            while part := plain.recv(4096):
                received += part
        except ConnectionResetError:
            pass
    # An alert of TLS's own at most.
    assert re.fullmatch(rb"(\x15\x03.\x00\x02..)?", received, re.S), received


def test_the_probe_needs_the_certificates_too(stack: Stack, authority: Authority, member: Issued) -> None:
    address = addresses(stack)["decode"]
    ours = {"BIPHASE_TLS_CERT": member.cert, "BIPHASE_TLS_KEY": member.key, "BIPHASE_TLS_CA": authority.ca}
    token = {"BIPHASE_SERVICE_TOKEN": SECRET}
    for environ, code in ((ours | token, 0), (token, 2)):
        done = subprocess.run(
            [sys.executable, "-m", "biphase.rpc.probe", address, "--timeout", "3"],
            env={**os.environ, **environ},
            capture_output=True,
            timeout=30,
            check=False,
        )
        assert done.returncode == code, done.stderr
