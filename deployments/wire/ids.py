"""Ids of answers and requests: made here, never taken from a client."""

import base64
import secrets

SEED_BITS = 53  # so that every JSON client can send a seed back unchanged


def new_id(prefix: str) -> str:
    """`prefix` and 26 base32 characters of 128 random bits."""
    return prefix + base64.b32encode(secrets.token_bytes(16)).decode("ascii").rstrip("=").lower()


def new_seed() -> int:
    return secrets.randbits(SEED_BITS)
