"""SAM, GSAM and logit adjustment against closed forms in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sgd_clients import batch_normed, linear, one_round, random_client_data, random_images
from torch import Tensor, nn
from torch.nn import functional as F
from toy_trainers import models_equal

from fairflower.clients import SGD, ClientData, Trainer
from fairflower.config import ClientConfig, RunConfig, TrainConfig
from fairflower.registry import CLIENTS
from fairflower.training.build import build_trainer
from fairflower.training.trainer import apply_sam_gradient

RHO = 0.05
#: FedISM's SALT, one full batch.
SALT = TrainConfig(
    local_epochs=1,
    batch_size=32,
    optimizer="adam",
    lr=3e-4,
    weight_decay=5e-4,
    sharpness="gsam",
    rho=0.05,
    alpha=0.1,
    logit_adjustment=True,
)


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4)
    )


def batch(n: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(n, 3, 8, 8, generator=generator)
    return x, torch.randint(4, (n,), generator=generator)


# --- the closed form, in float64 and from the layers' definitions -----------------------

Vector = list[Tensor]


def loss_of(w: Vector, x: Tensor, y: Tensor, prior: Tensor | None = None) -> Tensor:
    """Cross entropy of ``net()`` with the parameters w, batch norm in training mode."""
    filters, shift, gain, offset, head, bias = w
    places = x.unfold(2, 3, 1).unfold(3, 3, 1)  # [n, c, 6, 6, 3, 3]
    h = torch.einsum("nchwij,fcij->nfhw", places, filters) + shift.view(-1, 1, 1)
    mean, var = h.mean((0, 2, 3), keepdim=True), h.var((0, 2, 3), correction=0, keepdim=True)
    h = (h - mean) / (var + 1e-5).sqrt() * gain.view(-1, 1, 1) + offset.view(-1, 1, 1)
    odds = (h.clamp_min(0).flatten(1) @ head.T + bias).exp()
    if prior is not None:
        odds = odds * prior
    return -(odds[torch.arange(len(y)), y] / odds.sum(1)).log().mean()


def gradient_at(w: Vector, loss: Callable[[Vector], Tensor]) -> Vector:
    w = [p.detach().requires_grad_() for p in w]
    return list(torch.autograd.grad(loss(w), w))


def dot(a: Vector, b: Vector) -> float:
    return sum(float((p * q).sum()) for p, q in zip(a, b, strict=True))


def closed_form(w: Vector, loss: Callable[[Vector], Tensor], rho: float, alpha: float) -> Vector:
    g = gradient_at(w, loss)
    norm = dot(g, g) ** 0.5
    g_p = gradient_at([p + rho * q / norm for p, q in zip(w, g, strict=True)], loss)
    share = dot(g, g_p) / dot(g_p, g_p)
    return [b - alpha * (a - share * b) for a, b in zip(g, g_p, strict=True)]


def parameters(model: nn.Module) -> Vector:
    return [p.detach().double().clone() for p in model.parameters()]


@pytest.mark.parametrize("alpha", [0.0, 0.1, 0.7])
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_the_gradient_matches_gsams_closed_form_through_batch_norm(
    alpha: float, dtype: torch.dtype, close: float
) -> None:
    model, (x, y) = net().to(dtype), batch()
    x = x.to(dtype)

    def loss() -> Tensor:
        return F.cross_entropy(model(x), y)

    expected = closed_form(
        parameters(model), lambda w: loss_of(w, x.double(), y), rho=RHO, alpha=alpha
    )
    loss().backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    apply_sam_gradient(model, loss, RHO, alpha)
    for p, reference, before in zip(model.parameters(), expected, plain, strict=True):
        assert p.grad is not None
        torch.testing.assert_close(p.grad.double(), reference, rtol=0, atol=close)
        if p.dim() > 1:  # the second pass moved it by far more than that
            assert (p.grad - before).abs().max() > 1e-4


def test_gsam_removes_a_component_orthogonal_to_sams_gradient() -> None:
    x, y = batch()
    gradients = []
    for alpha in (0.0, 0.5):
        model = net().double()
        loss = lambda model=model: F.cross_entropy(model(x.double()), y)  # noqa: E731
        loss().backward()
        apply_sam_gradient(model, loss, RHO, alpha)
        gradients.append([p.grad for p in model.parameters()])
    sam, gsam = gradients
    removed = [a - b for a, b in zip(sam, gsam, strict=True)]
    assert dot(removed, removed) > 1e-8
    assert abs(dot(removed, sam)) < 1e-12


# --- parameters and statistics ------------------------------------------------------------------


def test_the_parameters_are_restored_exactly() -> None:
    model, (x, y) = net(), batch()
    with torch.no_grad():
        model[4].bias += 1e6  # adding and subtracting a step would round
        model[0].weight *= 1e-8
    before = parameters(model)
    loss = lambda: F.cross_entropy(model(x), y)  # noqa: E731
    loss().backward()
    apply_sam_gradient(model, loss, rho=3.3, alpha=0.1)
    assert all(torch.equal(p.double(), w) for p, w in zip(model.parameters(), before, strict=True))


def trained(settings: TrainConfig, model: nn.Module | None = None, name: str = "sgd") -> Trainer:
    client = build_trainer(
        ClientConfig(name), model or net(), random_client_data(), settings, client_id=3, seed=0
    )
    client.train(1)
    return client


@pytest.mark.parametrize("rule", ["none", "sam", "gsam"])
def test_batch_norm_counts_a_sam_step_once(rule: str) -> None:
    settings = TrainConfig(local_epochs=2, batch_size=8, lr=0.1, sharpness=rule)
    norm: Any = trained(settings).model[1]  # type: ignore[index]
    assert norm.num_batches_tracked == 2 * 3
    assert norm.track_running_stats
    # If the parameters do not move, the statistics equal those of plain steps.
    still = TrainConfig(local_epochs=2, batch_size=8, lr=0.0, weight_decay=0.0, rho=10.0)
    plain, sharp = (
        trained(TrainConfig(**(vars(still) | {"sharpness": name}))).send()
        for name in ("none", rule)
    )
    assert models_equal(plain, sharp)


@pytest.mark.parametrize("alpha", [0.0, 0.1])
def test_a_vanishing_gradient_gives_no_nan(alpha: float) -> None:
    model, (x, _) = net(), batch()
    for factor in (0.0, 1e-30):
        model.zero_grad()
        loss = lambda factor=factor: factor * model(x).sum()  # noqa: E731
        loss().backward()
        apply_sam_gradient(model, loss, RHO, alpha)
        assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", ["sam", "fedsam", "gsam"])
def test_only_parameters_that_are_not_frozen_train(name: str) -> None:
    model = net()
    model[0].weight.requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trained(TrainConfig(local_epochs=1, batch_size=8, lr=0.1), model, name)
    assert model[0].weight.grad is None
    moved = {key for key, p in model.named_parameters() if not torch.equal(p, before[key])}
    assert moved == set(before) - {"0.weight"}


# --- whole rounds ------------------------------------------------------------------------


def test_sam_clients_equal_sgd_with_the_same_settings() -> None:
    def arrays(name: str, **changes: Any) -> dict[str, np.ndarray]:
        settings = TrainConfig(local_epochs=2, batch_size=8, **changes)
        return trained(settings, batch_normed(), name).send()  # with dropout

    sam = arrays("sam", rho=0.1)
    assert models_equal(sam, arrays("sam", rho=0.1))
    assert models_equal(sam, arrays("sgd", rho=0.1, sharpness="sam"))
    assert models_equal(sam, arrays("gsam", rho=0.1, alpha=0.0))
    assert models_equal(sam, arrays("fedsam", rho=0.7))
    assert not models_equal(sam, arrays("gsam", rho=0.1))
    assert not models_equal(sam, arrays("sgd"))
    assert models_equal(arrays("gsam"), arrays("sgd", sharpness="gsam"))


def test_sam_with_rho_0_equals_sgd_except_with_dropout() -> None:
    def arrays(model: nn.Module, rule: str) -> dict[str, np.ndarray]:
        settings = TrainConfig(local_epochs=2, batch_size=8, sharpness=rule, rho=0.0)
        return trained(settings, model).send()

    assert models_equal(arrays(net(), "sam"), arrays(net(), "none"))
    assert not models_equal(arrays(batch_normed(), "sam"), arrays(batch_normed(), "none"))


def test_fedsam_has_its_own_rho() -> None:
    assert CLIENTS["fedsam"].arguments() == {"rho": 0.1}
    config = RunConfig.from_flat({"client.name": "fedsam", "client.rho": 0.2})
    assert config.label == "fedsam:rho=0.2+fedheal"
    client = build_trainer(
        config.client, net(), random_client_data(), TrainConfig(), client_id=0, seed=0
    )
    assert client.settings.rho == 0.2


def prior_of(client_data: ClientData) -> Tensor:
    counts = np.bincount(client_data.train.y, minlength=client_data.num_classes)
    return torch.tensor(counts / counts.sum())


def test_salt_matches_adam_with_new_moments_every_round() -> None:
    half = (0.5,) * 3
    client_data = ClientData(random_images(20, 0), random_images(5, 1), half, half, 4)
    client = build_trainer(ClientConfig("gsam"), net(), client_data, SALT, client_id=0, seed=0)
    x = torch.tensor(client_data.train.x).double() / 255 * 2 - 1
    y = torch.tensor(client_data.train.y)
    w = parameters(client.model)
    for server_round in (1, 2):
        gradient = closed_form(w, lambda w: loss_of(w, x, y, prior_of(client_data)), 0.05, 0.1)
        for i, (p, g) in enumerate(zip(w, gradient, strict=True)):
            g = g + 5e-4 * p
            m, v = 0.1 * g / (1 - 0.9), 0.001 * g**2 / (1 - 0.999)  # moments of a first step
            w[i] = p - 3e-4 * m / (v.sqrt() + 1e-8)
        client.train(server_round)
        for p, expected in zip(client.model.parameters(), w, strict=True):
            # The bias before batch norm has a gradient of rounding alone; Adam steps by it.
            if p is not client.model[0].bias:  # type: ignore[index]
                torch.testing.assert_close(p.detach().double(), expected, rtol=0, atol=2e-6)
        client.model[0].bias.data.copy_(w[1])  # type: ignore[index]


def test_fedprox_adds_its_gradient_to_that_of_gsam() -> None:
    half = (0.5,) * 3
    client_data = ClientData(random_images(20, 0), random_images(5, 1), half, half, 4)
    settings = TrainConfig(
        local_epochs=2, batch_size=32, lr=0.1, momentum=0.0, weight_decay=0.0, sharpness="gsam"
    )
    method = ClientConfig("fedprox", {"mu": 0.5})
    client = build_trainer(method, net(), client_data, settings, client_id=0, seed=0)
    x = torch.tensor(client_data.train.x).double() / 255 * 2 - 1
    y = torch.tensor(client_data.train.y)
    received = w = parameters(client.model)
    for _ in range(2):
        gradient = closed_form(w, lambda w: loss_of(w, x, y), 0.05, 0.1)
        w = [p - 0.1 * (g + 0.5 * (p - q)) for p, g, q in zip(w, gradient, received, strict=True)]
    client.train(1)
    for p, expected in zip(client.model.parameters(), w, strict=True):
        torch.testing.assert_close(p.detach().double(), expected, rtol=0, atol=2e-6)


# --- logit adjustment --------------------------------------------------------------------


def adjusted_client(labels: list[int]) -> SGD:
    half = (0.5,) * 3
    train = random_images(len(labels), 0)._replace(y=np.array(labels))
    settings = TrainConfig(local_epochs=3, batch_size=4, lr=0.1, logit_adjustment=True)
    client_data = ClientData(train, random_images(5, 1), half, half, 4)
    return SGD(linear(), client_data, settings, client_id=0, seed=0)


@pytest.mark.parametrize("labels", [[0, 0, 0, 1, 1, 2, 3, 3], [0, 0, 0, 0, 0, 1, 3, 3]])
def test_logit_adjustment_matches_the_softmax_with_prior_odds(labels: list[int]) -> None:
    client = adjusted_client(labels)
    logits = torch.randn(8, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y = torch.tensor(labels)
    loss = client.criterion(logits, y)
    loss.backward()
    odds = logits.detach().double().exp() * prior_of(client.data)
    chances = odds / odds.sum(1, keepdim=True)
    expected = -chances[torch.arange(8), y].log().mean()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-6)
    gradient = (chances - F.one_hot(y, 4)) / 8
    torch.testing.assert_close(logits.grad, gradient.float(), rtol=0, atol=1e-6)


def test_an_absent_class_gives_no_nan_and_its_logit_is_unchanged() -> None:
    client = adjusted_client([0, 0, 0, 0, 0, 1, 3, 3])
    before = client.send()
    after, loss = one_round(client, before)
    assert np.isfinite(loss)
    assert all(np.isfinite(array).all() for array in after.values())
    moved = np.abs(after["1.bias"] - before["1.bias"])
    assert moved[2] < 1e-6 < moved[[0, 1, 3]].min()  # weight decay alone
    # Testing uses the plain model, without the client's prior.
    x, y = next(client.test_examples.eval_batches(5))
    plain = F.cross_entropy(client.model(x), y).item()
    assert client.test()["eval_loss"] == pytest.approx(plain, rel=1e-6)


def test_gsam_handles_a_parameter_unused_in_the_second_pass():
    """As in a network that routes examples: g_p is 0 there, and g is orthogonal to it."""
    model = nn.ParameterList([torch.tensor([3.0]), torch.tensor([4.0])])
    (model[0] * 2 + model[1] * 1).sum().backward()
    apply_sam_gradient(model, lambda: model[0].square().sum(), RHO, 0.1)
    near = 2 * (3 + RHO * 2 / 5**0.5)  # the gradient of the square at the perturbed value
    assert model[0].grad.item() == pytest.approx(near)
    assert model[1].grad.item() == pytest.approx(-0.1)
    assert [p.item() for p in model] == [3.0, 4.0]
