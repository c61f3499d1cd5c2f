"""Masks from AES, in place of Flower's generator, which takes 32 bits of a seed.

A server that tries all 2^32 seeds would read the update of any client that has sent its masked
vector, but that it names as failed to the others.
"""

from __future__ import annotations

import hashlib
import math
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from fairflower.flower_compat import secaggplus_mod, secaggplus_workflow

#: Number of blocks of `aes_masks` that have begun, and the generators that the first one replaced.
_blocks = 0
_replaced: list[tuple[Any, Any]] = []
_lock = threading.Lock()


def masks_of(seed: bytes, num_range: int, shapes: list[tuple[int, ...]]) -> list[Any]:
    """Return int64 arrays of numbers below ``num_range``, a power of 2, from AES-256-CTR."""
    key = hashlib.sha256(seed).digest()
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()  # each key is used once
    drawn = [np.frombuffer(stream.update(bytes(4 * math.prod(shape))), "<u4") for shape in shapes]
    return [a.astype(np.int64).reshape(s) % num_range for a, s in zip(drawn, shapes, strict=True)]


@contextmanager
def aes_masks() -> Iterator[None]:
    """Make Flower's mod and its workflow use `masks_of` in the block, also in nested blocks."""
    global _blocks
    with _lock:
        if _blocks == 0:
            modules: list[Any] = [sys.modules[secaggplus_mod.__module__], secaggplus_workflow]
            _replaced[:] = [(module, module.pseudo_rand_gen) for module in modules]
            for module in modules:
                module.pseudo_rand_gen = masks_of
        _blocks += 1
    try:
        yield
    finally:
        with _lock:
            _blocks -= 1
            if _blocks == 0:
                for module, generator in _replaced:
                    module.pseudo_rand_gen = generator
