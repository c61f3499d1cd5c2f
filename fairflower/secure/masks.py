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

#: Flower's generators, as each block that has begun found them.
_flowers: list[list[Any]] = []
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
    modules: list[Any] = [sys.modules[secaggplus_mod.__module__], secaggplus_workflow]
    with _lock:
        _flowers.append([module.pseudo_rand_gen for module in modules])
        for module in modules:
            module.pseudo_rand_gen = masks_of
    try:
        yield
    finally:
        with _lock:  # the last block to end restores what the first one found
            generators = _flowers[0]
            _flowers.pop()
            if not _flowers:
                for module, generator in zip(modules, generators, strict=True):
                    module.pseudo_rand_gen = generator
