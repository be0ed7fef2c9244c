"""Digests weights as a model holds them in memory, so that replicas can compare what they serve.

Every byte of every parameter and persistent buffer counts, with its name, dtype and shape. Files are not compared: a
load that went wrong, or weights drawn at random, differ in memory alone.
"""

import hashlib

import torch
from torch import nn

CHUNK_WORDS = {"cpu": 1 << 15, "cuda": 1 << 24}  # at a time: what a core's cache holds, and few launches on a GPU


def weights_digest(*modules: nn.Module, described: str = "") -> str:
    """Returns the SHA-256, in hexadecimal digits, of the names, dtypes, shapes and checksums of all weights.

    Args:
        modules: The parts of one model, before anything changes its layers for speed.
        described: Text that else decides the answers, such as the order of a head's labels.
    """
    digest = hashlib.sha256(described.encode())
    for part, module in enumerate(modules):
        for name, tensor in sorted(module.state_dict().items()):
            digest.update(f"{part} {name} {tensor.dtype} {list(tensor.shape)} {_checksum(tensor)}\n".encode())
    return digest.hexdigest()


def joined_digest(*digests: str) -> str:
    """Returns one digest for several models that are served together."""
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


@torch.no_grad()
def _checksum(tensor: torch.Tensor) -> int:
    """Returns the sum of `word * (2 * index + 1)` over 32-bit words, modulo 2^64, computed where the tensor lies.

    The weight of a word is odd, so that one changed word always changes the sum, and two words in each other's places
    do too. It finds accidents; it is no defence against an attacker.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if (short := -flat.numel() % 4) or flat.storage_offset() % 4:
        flat = torch.cat((flat, flat.new_zeros(short)))
    words = flat.view(torch.int32)
    chunk = CHUNK_WORDS[words.device.type]
    odd = torch.arange(min(chunk, len(words)), device=words.device, dtype=torch.int64) * 2 + 1
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for at in range(0, len(words), chunk):
        part = words[at : at + chunk].long()
        total += (part * odd[: len(part)]).sum() + 2 * at * part.sum()
    return int(total) % (1 << 64)
