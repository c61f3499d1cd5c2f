"""Random seeds derived from the purpose of each random choice."""

import hashlib
import json


def derive_seed(*parts: int | str) -> int:
    """Hash the parts that identify a random choice into a seed, 0 <= seed < 2**63.

    The same parts give the same seed in every process and on every machine. Different parts, for
    example those of the next client or round, give an independent random stream.

    >>> derive_seed(0, 3, 1, "batches") == derive_seed(0, 3, 1, "batches")
    True
    >>> derive_seed(0, 3, 1, "batches") == derive_seed(0, 31, "batches")
    False
    """
    text = json.dumps([part if isinstance(part, str) else int(part) for part in parts])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
