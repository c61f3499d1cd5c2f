"""Masks from AES, in place of Flower's generator, which takes 32 bits of a seed.

A server that tries all 2^32 seeds would read the update of any client that has sent its masked
vector, but that it names as failed to the others.
"""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from flwr.client.mod import secaggplus_mod
from flwr.server.workflow.secure_aggregation import secaggplus_workflow


def masks_of(seed: bytes, num_range: int, shapes: list[tuple[int, ...]]) -> list[Any]:
    """Return int64 arrays of numbers below ``num_range``, a power of 2, from AES-256-CTR."""
    key = hashlib.sha256(seed).digest()
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()  # each key is used once
    drawn = [np.frombuffer(stream.update(bytes(4 * math.prod(shape))), "<u4") for shape in shapes]
    return [a.astype(np.int64).reshape(s) % num_range for a, s in zip(drawn, shapes, strict=True)]


@contextmanager
def aes_masks() -> Iterator[None]:
    """Make Flower's mod and its workflow use `masks_of` in the block."""
    modules: list[Any] = [sys.modules[secaggplus_mod.__module__], secaggplus_workflow]
    before = [module.pseudo_rand_gen for module in modules]
    try:
        for module in modules:
            module.pseudo_rand_gen = masks_of
        yield
    finally:
        for module, generator in zip(modules, before, strict=True):
            module.pseudo_rand_gen = generator
