"""The next token at each place of a text."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from fairflower.numerics.scores import NLL, PERPLEXITY, TOKEN_ACCURACY
from fairflower.tasks import Means, Targets, Task, Tensor, check_numbers


class NextToken(Task):
    """The next token at each place of a text: targets int64 [N, L], logits [B, L, vocabulary].

    An example is L places of a text: x are the token ids at the places, and a target is the id that
    follows, so a text of L + 1 tokens gives one example, and no network needs to shift its output.
    Id 0, which pads texts in x, is an unknown target, which is ignored; it may also hide targets
    that are not to be learnt. Each example has at least one known target.

    The loss of an example is the mean cross entropy over its known targets, so that long and short
    examples count alike in training. Scores are over all known targets of a domain: the loss per
    token in nats (the primary score), its exponential, perplexity, and the accuracy per token.
    Losses of domains whose tokens are of different size, such as bytes of letters in different
    scripts, are not comparable per word.
    """

    scores = NLL, PERPLEXITY, TOKEN_ACCURACY
    dtype = np.int64
    models: ClassVar = {"tokens": "gpt"}
    loss_range = 12.0  # that of guessing among 160,000 tokens

    def read(self, values: Targets, num_outputs: int | None = None) -> Targets:
        most = f"to {num_outputs - 1}" if num_outputs else "and more"
        expected = f"token ids 0 (unknown) {most} [N, L], the token after each place"
        shaped = values.ndim == 2 and values.dtype.kind in "iu"
        check_numbers(values, expected, shaped, 0, (num_outputs or math.inf) - 1)
        if len(empty := np.flatnonzero(~values.any(axis=1))):
            raise ValueError(f"found no known token in example {empty[0]}; expected at least one")
        return values.astype(np.int64)

    def num_outputs(self, targets: Targets) -> int:
        return 1 + int(targets.max(initial=0))

    def output_shape(self, num_outputs: int, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[1:], num_outputs)

    def made_up(self, n: int, num_outputs: int, shape: tuple[int, ...]) -> Targets:
        count = n * shape[-1]
        return (1 + np.arange(count) % max(1, num_outputs - 1)).reshape(n, shape[-1])

    def problem(self, network: Callable[[Tensor], Tensor], x: Tensor) -> str:
        before, after = (x * 0 + 1 for _ in range(2))
        after[:, -1] = 0
        before, after = (network(ids)[:, :-1] for ids in (before, after))
        if not before.numel() or (before - after).abs().max() <= 1e-4 * before.abs().max():
            return ""
        return "its output at a place depends on tokens after it. Choose a causal network"

    def losses(self, output: Tensor, y: Tensor) -> Tensor:
        known = y != 0
        return self._of_tokens(output, y).sum(1) / known.sum(1).clamp(min=1)

    def _of_tokens(self, output: Tensor, y: Tensor) -> Tensor:
        """Return the cross entropy at each place, [B, L]; 0 if the target is unknown."""
        from torch.nn import functional as F

        if y.ndim != 2 or y.is_floating_point() or output.shape[:-1] != y.shape:
            raise ValueError(
                f"The network returns {tuple(output.shape)} for targets {tuple(y.shape)} of type "
                f"{y.dtype}: expected logits [B, L, vocabulary] and token ids [B, L]."
            )
        each = F.cross_entropy(output.flatten(0, 1), y.flatten(), ignore_index=0, reduction="none")
        return each.reshape(y.shape)

    def predict(self, output: Tensor) -> Tensor:
        return output.argmax(-1)

    def sums(self, output: Tensor, y: Tensor) -> dict[str, Tensor]:
        known, losses = y != 0, self._of_tokens(output, y)
        return {
            "loss": (losses.sum(1) / known.sum(1).clamp(min=1)).sum(),
            "token_loss": losses.double().sum() if y.device.type != "mps" else losses.sum(),
            "tokens": known.sum(),
            "right": ((self.predict(output) == y) & known).sum(),
        }

    def score(self, means: Means) -> dict[str, float]:
        nll = means["token_loss"] / means["tokens"]
        return {
            "nll": nll,
            # Beyond the largest number, the perplexity is undefined.
            "perplexity": math.exp(nll) if nll < 700 else math.nan,
            "token_accuracy": means["right"] / means["tokens"],
        }

    def guess(self, num_outputs: int) -> float | None:
        return math.log(num_outputs)
