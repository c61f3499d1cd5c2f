"""The task next-token: losses, scores, and a network that must not look ahead."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fairflower import models
from fairflower.config import RunConfig
from fairflower.errors import ConfigError
from fairflower.models import trainable
from fairflower.tasks import task_of
from fairflower.training.fisher import fisher_diagonal
from fairflower.training.gradients import mean_gradient

TASK = task_of("next-token")


def batch(count: int = 5, length: int = 7, vocabulary: int = 11) -> tuple[Any, Any]:
    """Return logits [N, L, V] and targets, with short texts and a hidden place within a text."""
    draws = torch.Generator().manual_seed(3)
    y = torch.randint(1, vocabulary, (count, length), generator=draws)
    y[1, 4:], y[2, 1:], y[3, 2] = 0, 0, 0
    return torch.randn(count, length, vocabulary, generator=draws), y


def by_hand(logits: Any, y: Any) -> list[list[float]]:
    """Return the negative log probability of each known target, with Python's numbers."""
    losses = []
    for of_text, targets in zip(logits.tolist(), y.tolist(), strict=True):
        places = [(row, k) for row, k in zip(of_text, targets, strict=True) if k]
        losses.append([math.log(sum(map(math.exp, row))) - row[k] for row, k in places])
    return losses


def test_the_loss_of_an_example_is_the_mean_over_its_known_tokens() -> None:
    logits, y = batch()
    expected = [sum(of_text) / len(of_text) for of_text in by_hand(logits, y)]
    np.testing.assert_allclose(TASK.losses(logits, y), expected, rtol=1e-5)
    longer = torch.randn(5, 3, 11)
    padded = TASK.losses(torch.cat([logits, longer], 1), nn.functional.pad(y, (0, 3)))
    torch.testing.assert_close(padded, TASK.losses(logits, y))


def test_scores_are_over_all_tokens_however_they_are_divided() -> None:
    logits, y = batch()
    each = [loss for of_text in by_hand(logits, y) for loss in of_text]
    guesses = logits.argmax(-1)
    right = [g == k for g, k in zip(guesses[y > 0].tolist(), y[y > 0].tolist(), strict=True)]
    whole = {name: value / 5 for name, value in TASK.sums(logits, y).items()}
    parts = [TASK.sums(logits[rows], y[rows]) for rows in (slice(2), slice(2, 5))]
    again = {name: sum(part[name] for part in parts) / 5 for name in parts[0]}
    for means in (whole, again):
        scores = TASK.score({name: float(value) for name, value in means.items()})
        assert scores["nll"] == pytest.approx(sum(each) / len(each))
        assert scores["perplexity"] == pytest.approx(math.exp(sum(each) / len(each)))
        assert scores["token_accuracy"] == pytest.approx(sum(right) / len(right))
    assert math.isnan(TASK.score({"token_loss": 2e3, "tokens": 1, "right": 0})["perplexity"])
    assert TASK.score({"token_loss": math.log(4), "tokens": 1, "right": 0})["perplexity"] == (
        pytest.approx(4)
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            np.ones(3, np.int64),
            r"found int64 \[3\]; expected token ids 0 \(unknown\) to 4 \[N, L\]",
        ),
        (np.ones((3, 2)), r"found float64 \[3, 2\]"),
        (np.full((3, 2), 5), "found 5 for example 0; expected token ids 0"),
        (np.full((3, 2), -100), "found -100 for example 0"),
        (np.array([[1, 2], [0, 0]]), "found no known token in example 1; expected at least one"),
    ],
)
def test_other_targets_are_refused(values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TASK.read(values, 5)


def test_targets_are_read_as_they_are() -> None:
    values = np.array([[1, 4], [2, 0]], np.int32)
    read = TASK.read(values, 5)
    assert read.dtype == np.int64
    np.testing.assert_array_equal(read, values)
    assert TASK.num_outputs(read) == 5
    made = TASK.made_up(3, 5, (5, 4))
    np.testing.assert_array_equal(TASK.read(made, 5), made)
    assert made.shape == (3, 4)


def gpt(**options: Any) -> Any:
    return models.build("gpt:width=8:heads=2", 11, (11, 7), 0, task=TASK, **options)


def test_a_causal_transformer_predicts_from_earlier_tokens_only() -> None:
    model, x = gpt().eval(), torch.randint(1, 11, (3, 7))
    before = model(x)
    assert before.shape == (3, 7, 11)
    for place in range(7):
        changed = x.clone()
        changed[:, place] = x[:, place] % 10 + 1
        same = (before == model(changed)).all(-1).all(0).tolist()
        assert same == [k < place for k in range(7)]
    padded = nn.functional.pad(x[:, :4], (0, 3))
    torch.testing.assert_close(model(padded)[:, :4], before[:, :4])
    torch.testing.assert_close(model.represent(padded), model.features(x[:, :4]).mean(1))


def test_attention_is_that_of_pytorchs_own_layers() -> None:
    """The same weights in ``nn.TransformerEncoderLayer``."""
    model, x = gpt().eval(), torch.randint(1, 11, (3, 7))
    hidden = model.tokens(x) + model.places.weight
    for block in model.blocks:
        with torch.no_grad():
            for parameter in block.parameters():
                parameter += 0.1 * torch.randn_like(parameter)
        layer = nn.TransformerEncoderLayer(
            8, 2, 32, 0, lambda z: nn.functional.gelu(z, approximate="tanh"), batch_first=True,
            norm_first=True,
        ).eval()  # fmt: skip
        own = [layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias]
        own += [*layer.self_attn.out_proj.parameters(), *layer.linear1.parameters()]
        own += [*layer.linear2.parameters(), *layer.norm1.parameters(), *layer.norm2.parameters()]
        theirs = [block.attend, block.join, block.layer1, block.layer2, block.norm1, block.norm2]
        with torch.no_grad():
            for a, b in zip(own, (p for m in theirs for p in m.parameters()), strict=True):
                a.copy_(b)
        mask = nn.Transformer.generate_square_subsequent_mask(7)
        hidden = layer(hidden, src_mask=mask, is_causal=True)
    torch.testing.assert_close(model.features(x), model.norm(hidden))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("embedding-bag", "needs a vector at each place"),
        ("gpt:width=6:heads=4", "width = 6 is not divisible by heads = 4"),
        (f"{__name__}:Seer", "Seer: its output at a place depends on tokens after it"),
    ],
)
def test_networks_that_do_not_fit_are_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        models.build(name, 11, (11, 7), 0, task=TASK)


class Seer(models.Classifier):
    """A network that sees all tokens at each place."""

    kinds = ("tokens",)

    def __init__(self, num_classes: int, shape: tuple[int, int]) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape[0], 4)
        self.head = nn.Linear(4, num_classes)

    def features(self, x: Any) -> Any:
        each = self.tokens(x)
        return each + each.mean(1, keepdim=True)


def test_gradients_and_fisher_are_those_of_single_texts() -> None:
    model, (_, y) = gpt(), batch()
    x = torch.randint(1, 11, y.shape, generator=torch.Generator().manual_seed(1))
    gradients = []
    for k in range(len(y)):
        loss = TASK.losses(model.eval()(x[k : k + 1]), y[k : k + 1]).sum()
        gradients.append(torch.autograd.grad(loss, [*trainable(model).values()]))
    mean, fisher = (
        mean_gradient(model, [(x, y)], task=TASK),
        fisher_diagonal(model, [(x, y)], task=TASK),
    )
    for k, name in enumerate(trainable(model)):
        stacked = torch.stack([of_text[k] for of_text in gradients])
        torch.testing.assert_close(mean[name], stacked.mean(0), rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(fisher[name], stacked.square().mean(0), rtol=1e-3, atol=1e-8)


def test_the_default_model_follows_the_task() -> None:
    def model(**flat: str) -> str:
        return RunConfig.from_flat({k.replace("_", "."): v for k, v in flat.items()}).model.name

    assert model(data_name="languages") == model(data_name="corpus") == "gpt"
    assert model(data_name="texts") == "embedding-bag"
    assert model(data_name="texts", data_task="next-token") == "gpt"
    assert model(data_name="languages", model_name="gpt:layers=1") == "gpt:layers=1"


def test_the_default_network_is_as_large_as_documented() -> None:
    model = models.build("gpt", 257, (257, 64), 0, task=TASK)
    assert sum(p.numel() for p in model.parameters()) == 137_345
