"""One seed for every random choice, derived from what the choice is about."""

from __future__ import annotations

import hashlib
import json


def derive_seed(*parts: int | str) -> int:
    """Hash what a random choice is about into a seed, 0 <= seed < 2**63.

    The same parts give the same seed in every process and on every machine, and
    related parts (client 3 and 4, round 1 and 2) give unrelated streams.

    >>> derive_seed(0, 3, 1, "batches") == derive_seed(0, 3, 1, "batches")
    True
    >>> derive_seed(0, 3, 1, "batches") == derive_seed(0, 31, "batches")
    False
    """
    text = json.dumps([part if isinstance(part, str) else int(part) for part in parts])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
