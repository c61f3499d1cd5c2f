"""FedCE and HarmoFL, which were published on segmentation: whole runs against written-out loops."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_up import ROWS, SIDE, Images
from parametrize import at_night
from resuming import config, session
from runs import history
from safetensors.numpy import load_file
from torch import Tensor, nn

from fairflower.config import DataConfig
from fairflower.models import build
from fairflower.tasks import task_of

ROUNDS, EPOCHS, LR, MOMENTUM, DECAY = 3, 5, 0.2, 0.9, 0.001
CLASSES, DOMAINS = 3, ("a", "b", "c")
SETTINGS: dict[str, Any] = {
    **{"data.name": "made_up:Images", "data.augment": False, "data.examples-per-client": 0},
    **{"data.test-examples": 0, "num-server-rounds": ROUNDS, "fraction-train": 1.0},
    **{"train.local-epochs": EPOCHS, "train.batch-size": ROWS, "train.lr": LR},
    **{"train.momentum": MOMENTUM, "train.weight-decay": DECAY},
}

State = dict[str, Tensor]
Loss = Callable[[nn.Module], Tensor]


def examples(split: str) -> list[tuple[Tensor, Tensor]]:
    """Return each domain's images in [0, 1] and masks, double [N, 1, H, W] and long [N, H, W]."""
    data = Images(DataConfig(name="made_up:Images"))
    rows = np.arange(ROWS)
    return [
        (
            torch.from_numpy(data.images(d, split, rows)).double()[:, None] / 255,
            torch.from_numpy(data.labels(d, split)).long(),
        )
        for d in DOMAINS
    ]


def network(norm: str) -> nn.Module:
    task = task_of("segmentation")
    model = build(f"unet:width=4:norm={norm}", CLASSES, (1, SIDE, SIDE), seed=0, task=task)
    return model.double()


def loss_of(logits: Tensor, masks: Tensor) -> Tensor:
    """Return the mean over images of pixel cross entropy and soft Dice loss, without 255."""
    total = torch.zeros((), dtype=torch.float64)
    for o, mask in zip(logits, masks, strict=True):
        known = mask < 255
        p, y = o.softmax(0)[:, known], mask[known]
        total = total - p[y, torch.arange(len(y))].log().mean() + 1
        for c in range(1, CLASSES):
            overlap, sizes = p[c][y == c].sum(), p[c].sum() + (y == c).sum()
            total = total - (2 * overlap + 1) / (sizes + 1) / (CLASSES - 1)
    return total / len(masks)


def mean_dice(logits: Tensor, masks: Tensor) -> float:
    guess, known = logits.argmax(1), masks < 255
    dice = []
    for c in range(1, CLASSES):
        true, found = known & (masks == c), known & (guess == c)
        dice.append(2 * float((true & found).sum()) / float(true.sum() + found.sum()))
    return float(np.mean(dice))


def trained(model: nn.Module, start: State, loss: Loss, radius: float = 0.0) -> State:
    """Return the model after a client's epochs of one batch, at ``w + radius g / |g|`` if set."""
    model.load_state_dict(start)
    model.train()
    weights = list(model.parameters())
    velocity = [torch.zeros_like(w) for w in weights]
    for _ in range(EPOCHS):
        gradient = torch.autograd.grad(loss(model), weights)
        if radius:
            norm = torch.cat([g.flatten() for g in gradient]).norm()
            kept = [w.detach().clone() for w in weights]
            with torch.no_grad():
                for w, g in zip(weights, gradient, strict=True):
                    w += radius * g / norm
            gradient = torch.autograd.grad(loss(model), weights)
            with torch.no_grad():
                for w, before in zip(weights, kept, strict=True):
                    w.copy_(before)
        with torch.no_grad():
            for w, v, g in zip(weights, velocity, gradient, strict=True):
                v.mul_(MOMENTUM).add_(g + DECAY * w)
                w -= LR * v
    return {name: value.clone() for name, value in model.state_dict().items()}


def mean(states: list[State], weights: Any) -> State:
    return {
        name: sum(w * state[name] for w, state in zip(weights, states, strict=True))  # type: ignore[misc]
        if value.is_floating_point()
        else value
        for name, value in states[0].items()
    }


def run(folder: Path, **changes: Any) -> tuple[Path, dict[str, np.ndarray]]:
    made = session(config(folder, **SETTINGS | changes)).run()
    return made, load_file(made / "model.safetensors")


def domain_dice(folder: Path) -> list[list[float]]:
    """Return the mean Dice score of each domain in each round, [R][D]."""
    rows = [r for r in history(folder) if (r["level"], r["metric"]) == ("domain", "dice")]
    of = {(int(r["round"]), r["name"]): float(r["value"]) for r in rows}
    return [[of[server_round, d] for d in DOMAINS] for server_round in range(1, ROUNDS + 1)]


def normalized(scores: np.ndarray) -> np.ndarray:
    floored = np.maximum(scores, 1e-6)
    return np.asarray(floored / floored.sum())


@pytest.mark.parametrize("mode", ["times", at_night("plus")])
def test_fedce(tmp_path: Path, mode: str) -> None:
    changes = {"strategy.name": "fedce", "strategy.mode": mode}
    folder, found = run(tmp_path, **changes, **{"model.name": "unet:width=4:norm=batch"})
    lines = (folder / "diagnostics.jsonl").read_text().splitlines()
    weights = [json.loads(line)["weights"] for line in lines]

    model, data = network("batch"), examples("train")
    names = [name for name, _ in model.named_parameters()]
    images = [(x - 0.5) / 0.5 for x, _ in data]
    theta, last, c = dict(model.state_dict()), [], np.full(3, 1 / 3)
    theta = {name: value.clone() for name, value in theta.items()}
    cosines, minus, coefficients = [], [], []
    for server_round in range(ROUNDS):
        scores = []
        for k in range(3):  # the mean Dice score of the model without client k, on its data
            rest = theta
            if last:
                rest = {
                    name: (value - c[k] * last[k][name]) / (1 - c[k])
                    if value.is_floating_point()
                    else value
                    for name, value in theta.items()
                }
            rest = {n: v.clamp(min=0) if n.endswith("running_var") else v for n, v in rest.items()}
            model.load_state_dict(rest)
            with torch.no_grad():
                scores.append(mean_dice(model.eval()(images[k]), data[k][1]))
        last = [
            trained(model, theta, lambda net, k=k: loss_of(net(images[k]), data[k][1]))  # type: ignore[misc]
            for k in range(3)
        ]
        updates = np.array(
            [torch.cat([(state[n] - theta[n]).flatten() for n in names]).numpy() for state in last]
        )
        consensus = c @ updates
        rest_of = [consensus - c[k] * updates[k] for k in range(3)]
        cosines.append(
            [
                float(u @ r / np.linalg.norm(u) / np.linalg.norm(r))
                for u, r in zip(updates, rest_of, strict=True)
            ]
        )
        minus.append(scores)
        A, B = (normalized(1 - np.mean(values, axis=0)) for values in (cosines, minus))
        coefficients.append(normalized(A * B if mode == "times" else A + B))
        c = np.mean(coefficients, axis=0)
        np.testing.assert_allclose(weights[server_round], c, rtol=1e-4)
        theta = mean(last, c)
    for name in names:
        np.testing.assert_allclose(found[name], theta[name], rtol=1e-3, atol=2e-4, err_msg=name)


def test_harmofl(tmp_path: Path) -> None:
    changes = {"client.name": "harmofl", "client.alpha": 0.05, "strategy.name": "uniform"}
    folder, found = run(tmp_path, **changes, **{"model.name": "unet:width=4"})
    tested = domain_dice(folder)

    model, data, unseen = network("group"), examples("train"), examples("test")
    theta = {name: value.clone() for name, value in model.state_dict().items()}
    own = [torch.fft.fft2(x).abs().mean(0) for x, _ in data]
    common = torch.stack(own).mean(0)  # the server's mean, which is fixed after round 1

    def harmonized(x: Tensor, amplitude: Tensor) -> Tensor:
        phase = torch.fft.fft2(x).angle()
        images = torch.fft.ifft2(amplitude * torch.exp(1j * phase)).real
        return (images - 0.5) / 0.5

    for server_round in range(ROUNDS):
        states = []
        for k, (x, masks) in enumerate(data):
            inputs = harmonized(x, common if server_round else own[k])
            states.append(
                trained(model, theta, lambda net, i=inputs, y=masks: loss_of(net(i), y), 0.05)  # type: ignore[misc]
            )
        theta = mean(states, np.full(3, 1 / 3))
        model.load_state_dict(theta)
        with torch.no_grad():
            dice = [mean_dice(model.eval()(harmonized(x, common)), y) for x, y in unseen]
        np.testing.assert_allclose(tested[server_round], dice, atol=0.003)
    half = common[..., : SIDE // 2 + 1]
    np.testing.assert_allclose(found["amplitude_norm.running_mean"], half, rtol=1e-4, atol=1e-4)
    for name, value in theta.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-3, atol=2e-4, err_msg=name)
