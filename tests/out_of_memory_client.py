"""A client that fails with simulated out-of-memory errors of a GPU."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import torch

from fairflower.clients import SGD

#: PyTorch's error message.
ERROR = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of "
    "which 1.50 GiB is free. Including non-PyTorch memory, this process has 70.00 GiB in use."
)
#: The part of it that fairflower shows.
REASON = ERROR.partition(". Including")[0]


class OutOfMemoryClient(SGD):
    """Runs out of memory in round 2; OUT_OF_MEMORY, "count:folder", limits failures."""

    def begin(self, server_round: int) -> None:
        max_failures, _, folder = os.environ["OUT_OF_MEMORY"].partition(":")
        for failure in range(int(max_failures) if server_round == 2 else 0):
            with suppress(FileExistsError):  # each file lets one process fail once
                (Path(folder) / f"failure{failure}").touch(exist_ok=False)
                raise torch.OutOfMemoryError(ERROR)
        super().begin(server_round)
