"""Base class of trainers in which each client has its own values of some arrays."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from numpy.typing import NDArray
from torch import nn

from fairflower.exchanges.stored import PersonalArrays
from fairflower.files import Arrays
from fairflower.models import copy_arrays, initial_local_arrays, keep_local, local_tensors, to_numpy
from fairflower.training.trainer import Trainer, personal_score

#: Key of `Trainer.state` for the client's values of these arrays.
LOCAL = "local"


class LocalArraysTrainer(Trainer):
    """Local training in which each client has its own values of some arrays.

    A subclass returns the names of these arrays from ``local_arrays``. They are not part of the
    global model, and the strategy does not use them. A client keeps its values from round to round
    and starts with the network's initial values, which are the same for all clients of a run.

    With ``keep = "client"`` the client stores these arrays and never sends them. With
    ``keep = "server"`` the client sends them with its model, and the server stores them and sends
    them back to this client alone (`fairflower.exchanges.PersonalArrays`). Results are identical,
    bit for bit. If the server keeps the arrays, a client that loses its disk loses nothing, but the
    server sees the arrays.

    ``test`` reports ``accuracy`` and ``eval_loss`` of the global model, in which these arrays have
    their initial values, as on the server. ``personal_accuracy`` is the accuracy of the client's
    own model: the shared arrays together with its own arrays.
    """

    #: Name, in warnings and reports, of the part of the network that stays with the clients.
    local_part: ClassVar[str] = "normalization"

    def __init__(
        self, *args: Any, keep: Literal["client", "server"] = "client", **options: Any
    ) -> None:
        super().__init__(*args, **options)
        self.keep = keep
        keep_local(self.model, self.local_arrays(self.model))

    @classmethod
    def shared_arrays(cls, model: nn.Module) -> dict[str, NDArray[Any]]:
        """Copy the arrays that the server sends in a Flower app of your own: those not kept.

        >>> from fairflower.clients.fedbn import FedBN
        >>> net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
        >>> list(FedBN.shared_arrays(net))
        ['0.weight', '0.bias']
        """
        local = set(cls.local_arrays(model))
        return {name: array for name, array in copy_arrays(model).items() if name not in local}

    def load_local_arrays(self) -> None:
        """Set the local arrays to the client's values, or to the initial values if it has none."""
        kept_by_server = self.keep == "server"
        self._set(self.shared.get(PersonalArrays.name) if kept_by_server else self.state.get(LOCAL))

    def train(self, server_round: int) -> dict[str, float]:
        """Train with the client's own arrays; afterwards store or return them."""
        self.load_local_arrays()
        metrics = super().train(server_round)
        own = {
            name: to_numpy(tensor, copy=True) for name, tensor in local_tensors(self.model).items()
        }
        if self.keep == "server":
            self.returns[PersonalArrays.name] = own
        elif own:
            self.state[LOCAL] = own
        return metrics

    def test(self) -> dict[str, float]:
        """Test the global model and, if arrays stay with the client, its personal model."""
        if not local_tensors(self.model):
            return super().test()
        self._set(None)
        metrics = super().test()
        self.load_local_arrays()
        return metrics | personal_score(self)

    def _set(self, values: Arrays | None) -> None:
        """Copy values into the local arrays; None restores the initial values."""
        initial = initial_local_arrays(self.model)
        with torch.no_grad():
            for name, tensor in local_tensors(self.model).items():
                if values is None:
                    tensor.copy_(initial[name])
                else:
                    tensor.copy_(torch.tensor(values[name], device=tensor.device))

    @classmethod
    def make_exchanges(cls, arguments: Mapping[str, Any]) -> list[Any]:
        made = super().make_exchanges(arguments)
        return [*made, PersonalArrays()] if arguments.get("keep") == "server" else made

    @classmethod
    def run_warning(cls, model: nn.Module, by: str) -> str:
        """Return a warning if there are no local arrays or no tests of personal models; else ""."""
        if not local_tensors(model):
            return (
                f"{cls.__name__}: the network has no arrays that could stay with the clients "
                f"({cls.local_part}). The run is equivalent to plain local training (FedAvg)."
            )
        if by == "server":
            return (
                f"{cls.__name__}: the server tests the global model with the initial values of "
                f'{cls.local_part}. Set evaluate.by = "both" to test the clients\' own models.'
            )
        return ""
