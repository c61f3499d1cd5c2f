"""Mean loss over a data set, its gradient, and its sharpness."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fairflower.models import trainable
from fairflower.tasks import CLASSIFICATION, Task, task_of
from fairflower.training.batches import Examples
from fairflower.training.device import float64_on
from fairflower.training.modes import eval_mode

#: A client's examples; or batches (x [B, ...], y [B, ...]), also as dicts with the names below.
Batches = Examples | Iterable[Sequence[Tensor] | Mapping[str, Any]]

#: Names of x and y in data sets on the Hugging Face Hub, and in Flower's tutorials.
INPUTS = ("img", "image", "x", "pixel_values", "features")
LABELS = ("label", "labels", "y", "fine_label")

#: Number of examples per forward pass over `Examples`: as in training, to use as much memory.
_BATCH_SIZE = 64


@torch.enable_grad()
def mean_gradient(
    model: nn.Module, data: Batches, *, task: Task | None = None
) -> dict[str, Tensor]:
    """Return the gradient of the mean loss over a data set, by trainable parameter.

    A gradient has its parameter's type, shape and device, and is 0 if the parameter does not affect
    the output. A parameter shared by several modules appears once, as in ``named_parameters``. The
    model is in eval mode during the call; its parameters and their ``.grad`` are unchanged.

    Raises ``ValueError`` if there are no samples, or outputs and targets do not fit the task; and
    ``TypeError`` if a batch is neither a pair of tensors nor a dict of the form below.

    Parameters
    ----------
    model
        The network, which returns logits [B, classes] for the default task.
    data
        A client's examples, which are not augmented; or batches (x [B, ...], y int64 [B]), for
        example a DataLoader or a generator, also as dicts ``{"img": x, "label": y}``.
    task
        What is learnt (`fairflower.tasks`). Default: classification, with the cross entropy.

    Examples
    --------
    >>> import torch
    >>> model = torch.nn.Linear(1, 2, bias=False)
    >>> _ = torch.nn.init.zeros_(model.weight)
    >>> mean_gradient(model, [(torch.tensor([[2.0]]), torch.tensor([0]))])["weight"].tolist()
    [[-1.0], [1.0]]

    See Also
    --------
    mean_loss, sharpness, fairflower.training.fisher.fisher_diagonal
    """
    with eval_mode(model):
        return _mean(model, data, task, None, trainable(model))[1]


@torch.no_grad()
def mean_loss(model: nn.Module, data: Batches, *, task: Task | None = None) -> float:
    """Return the mean loss over a data set.

    The measurement ``received_loss`` is this loss before training, and ``trained_loss`` is this
    loss after training. The model is in eval mode during the call, and is unchanged. For
    parameters and errors see `mean_gradient`.
    """
    with eval_mode(model):
        return _mean(model, data, task)[0]


def sharpness(
    model: nn.Module, data: Batches, *, rho: float = 0.05, task: Task | None = None
) -> float:
    """Return the increase in the mean loss at distance rho along the gradient, at least 0.

    S = L(theta + rho g / ||g||) - L(theta), where L is the mean over the data set, g its gradient,
    and the norm is over all trainable parameters (Foret et al., ICLR 2021; Eq. 8 of Wu et al.,
    IJCAI 2024). To first order, this is the largest increase within distance rho. The model is in
    eval mode during the call (batch norm uses its running statistics and does not update them), and
    is unchanged. ``rho`` is in units of the parameters; default 0.05 (FedISM). For other arguments
    and errors see `mean_gradient`.
    """
    loss, perturbed = losses_at(model, data, rho=rho, task=task)
    return max(perturbed - loss, 0.0)


@torch.enable_grad()
def losses_at(
    model: nn.Module, data: Batches, *, rho: float = 0.05, task: Task | None = None
) -> tuple[float, float]:
    """Return the mean loss at the model, and at distance rho along its gradient.

    See `sharpness` for the formula, parameters and errors.
    """
    if isinstance(data, Iterator):
        data = list(data)  # for two passes
    with eval_mode(model):
        loss, gradient = _mean(model, data, task, None, trainable(model))
        norms = [torch.linalg.vector_norm(g, dtype=float64_on(g.device)) for g in gradient.values()]
        norm = torch.linalg.vector_norm(torch.stack(norms)).item()
        if norm == 0:
            return loss, loss
        step = rho / norm
        moved = {name: p.detach() + step * gradient[name] for name, p in trainable(model).items()}
        with torch.no_grad():
            neighbor = _mean(model, data, task, lambda x: functional_call(model, moved, (x,)))[0]
    return loss, neighbor


def _mean(
    model: nn.Module,
    data: Batches,
    task: Task | None = None,
    output_of: Callable[[Tensor], Tensor] | None = None,
    parameters: Mapping[str, Tensor] | None = None,
) -> tuple[float, dict[str, Tensor]]:
    """Return the mean loss and, for ``parameters``, its gradient, in the current mode."""
    task = task or task_of(CLASSIFICATION)
    device = next(model.parameters()).device
    # On the device: a sum on the CPU would wait for the GPU in every batch.
    losses, n = torch.zeros((), dtype=float64_on(device), device=device), 0
    total = {name: torch.zeros_like(p) for name, p in (parameters or {}).items()}
    for x, y in batches_of(model, data):
        loss = task.loss((output_of or model)(x), y, "sum")
        if parameters is not None:
            for name, gradient in gradients_of(loss, parameters).items():
                total[name] += gradient
        losses += loss.detach()
        n += len(y)
    return losses.item() / checked_count(n), {name: value / n for name, value in total.items()}


def checked_count(n: int) -> int:
    """Return the number of samples; raise ``ValueError`` if there are none."""
    if n == 0:
        raise ValueError("There are no samples, so a mean is undefined. Pass at least one.")
    return n


def batches_of(model: nn.Module, data: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield batches on the model's device; raise ``TypeError`` for other kinds of batches."""
    device = next(model.parameters()).device
    for batch in data.eval_batches(_BATCH_SIZE) if isinstance(data, Examples) else data:
        pair = batch
        if isinstance(batch, Mapping):
            pair = [batch[name] for names in (INPUTS, LABELS) for name in names if name in batch]
        if not (isinstance(pair, Sequence) and [*map(torch.is_tensor, pair)] == [True, True]):
            content = list(batch) if isinstance(batch, Mapping) else type(batch).__name__
            raise TypeError(
                f"A batch is {content}: expected tensors (x, y), or a dict with x "
                f"({', '.join(INPUTS)}) and y ({', '.join(LABELS)})."
            )
        x, y = pair
        yield x.to(device), y.to(device)


def gradients_of(
    loss: Tensor, parameters: Mapping[str, Tensor], *, retain_graph: bool = False
) -> dict[str, Tensor]:
    """Return the loss's gradient for each parameter; 0 if the loss does not depend on it."""
    gradients = torch.autograd.grad(
        loss, list(parameters.values()), retain_graph=retain_graph, materialize_grads=True
    )
    return dict(zip(parameters, gradients, strict=True))
