"""Proves to both ends of a link that the other one holds the same key, before either reads a message of the other.

The server sends a nonce, the client answers with a nonce of its own and a proof, and the server answers with its own.
A proof is the HMAC-SHA256 of both nonces, the server's instance and the role of the prover, so that neither a
recorded nor a reflected proof is of any use. The key is the replica's secret, which only Ray's calls give away, mixed
with the cluster's token where Ray's authentication is on.
"""

import hashlib
import hmac
import os
import secrets
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from deployments.link.frames import FrameError

NONCE_BYTES = 32
SECRET_BYTES = 32
TOKEN_FILE = Path(".ray") / "auth_token"  # in the home folder: where Ray keeps its token by default


class LinkAddress(NamedTuple):
    """Says where a replica's link server listens. It travels over Ray alone, since it holds the server's secret."""

    replica: str  # unique id
    instance: str  # of the server: another one after a restart
    secret: bytes
    local: str  # name of the abstract Unix socket; empty where there is none
    host: str = ""  # of the TCP socket; empty where there is none
    port: int = 0


class Hello(msgspec.Struct, array_like=True):
    """Holds what a server sends first."""

    instance: str
    nonce: bytes


class Proof(msgspec.Struct, array_like=True):
    """Holds what a client answers."""

    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, array_like=True):
    """Holds what a server sends once it knows the client."""

    proof: bytes


def cluster_token() -> bytes:
    """Returns the token of Ray's authentication, where Ray itself looks for it; empty if it is off or not found."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return b""
    if token := os.environ.get("RAY_AUTH_TOKEN"):
        return token.strip().encode()
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / TOKEN_FILE)
    try:
        return file.read_text("utf-8").strip().encode()
    except (OSError, UnicodeError):
        return b""


def link_key(secret: bytes) -> bytes:
    """Returns the key of a server with this secret, in this cluster."""
    return hmac.digest(secret, b"assay link" + hashlib.sha256(cluster_token()).digest(), "sha256")


def new_nonce() -> bytes:
    """Returns a nonce."""
    return secrets.token_bytes(NONCE_BYTES)


def proof_of(
    role: Literal["client", "server"], key: bytes, instance: str, server_nonce: bytes, client_nonce: bytes
) -> bytes:
    """Returns the proof that an end in this role holds the key.

    Raises:
        FrameError: a nonce is not of NONCE_BYTES bytes.
    """
    if len(server_nonce) != NONCE_BYTES or len(client_nonce) != NONCE_BYTES:
        raise FrameError(f"A nonce must be {NONCE_BYTES} bytes.")
    return hmac.digest(key, b"\0".join((role.encode(), server_nonce + client_nonce, instance.encode())), "sha256")


def is_proof(given: bytes, expected: bytes) -> bool:
    """Returns whether the proof is the expected one, in a time that does not depend on where they differ."""
    return hmac.compare_digest(given, expected)
