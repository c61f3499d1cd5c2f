"""HarmoFL (Jiang, Wang, Dou, AAAI 2022)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from fairflower.arguments import Range, Search
from fairflower.data import Federation
from fairflower.training.trainer import Trainer


class HarmoFL(Trainer):
    """Local training on images of one common amplitude, towards flat minima.

    **Amplitude normalisation.** An image x has a Fourier transform of amplitude A and
    phase P. All clients' images, in training and in testing, get one amplitude::

        x <- F^-1(A_mean exp(i P))

    In the first round a client keeps a running mean over its batches,
    ``A_k <- (1 - momentum) A_k + momentum * (mean of the batch)``, and normalises by it
    as it goes; the server averages the A_k, and the result stays. A_mean is a buffer of
    the model (`AmplitudeNorm`), so it travels, is averaged and is saved as batch norm's
    statistics are, and whoever has the model tests it rightly.

    **Weight perturbation.** A step takes the gradient at ``w + alpha g / ||g||``, which
    is SAM's (`fairflower.training.optim.sharpen`) with the radius alpha; ``train.rho`` is
    not used. The original trains by SGD with momentum 0.9 and weight decay 1e-4.

    The original averages the A_k with equal weights, here they have their models'. Its
    running mean begins at the first batch's mean, and so does this one. Its released code
    exchanges the zero frequency alone, which is the image's mean colour: ``band = 0``. It
    also declares the momentum a whole number, which makes 0.1 a 0 where that is no error.

    Parameters
    ----------
    alpha
        Default 0.05 (released code).
    momentum
        Default 0.1 (released code).
    band
        Which frequencies are normalised: up to this many cycles per pixel, down and
        across. Default 0.5, which is all of them.
    """

    paper = "Jiang, Wang, Dou, AAAI 2022"
    kinds = ("images",)
    sharpness = "sam"

    def __init__(
        self,
        *args: Any,
        alpha: Annotated[float, Range(0), Search(0.005, 0.5, log=True)] = 0.05,
        momentum: Annotated[float, Range(0, 1)] = 0.1,
        band: Annotated[float, Range(0, 0.5)] = 0.5,
        **options: Any,
    ) -> None:
        super().__init__(*args, **options)
        self.settings = replace(self.settings, rho=alpha)
        x, mean, std = self.data.train.x, self.data.mean, self.data.std
        _normalise(self.model, x.shape[1:], mean, std, momentum, band)
        self.model.to(self.device)

    @classmethod
    def adapt(cls, model: nn.Module, federation: Federation, **arguments: Any) -> None:
        """Put the normalisation before a network, with nothing known yet."""
        shape, mean, std = federation.shape, federation.mean, federation.std
        _normalise(model, shape, mean, std, arguments["momentum"], arguments["band"])

    def begin(self, server_round: int) -> None:
        """Start a running mean where there is no common amplitude yet."""
        layer = self.model.amplitude_norm
        assert isinstance(layer, AmplitudeNorm)
        layer.track_running_stats = not bool(layer.running_mean.any())
        layer.batches = 0


class AmplitudeNorm(nn.Module):
    """Gives normalised images [N, C, H, W] the amplitude ``running_mean``.

    It works on intensities as they were, in [0, 1]: in a centred image the zero
    frequency's phase says whether it is dark or bright, and its amplitude how much.

    Parameters
    ----------
    shape
        C, H, W.
    mean, std
        Per channel, that the images were normalised with.
    momentum, band
        See `HarmoFL`.
    """

    mean: Tensor
    std: Tensor
    normalised: Tensor
    #: Mean amplitude [C, H, W // 2 + 1]; where nothing is known it is 0, and images keep their own.
    running_mean: Tensor
    #: Whether that moves in training mode.
    track_running_stats = False
    #: How many batches it is the mean of; 0 begins anew.
    batches = 0

    def __init__(
        self,
        shape: Sequence[int],
        mean: Sequence[float],
        std: Sequence[float],
        momentum: float,
        band: float,
    ) -> None:
        super().__init__()
        channels, height, width = shape
        self.momentum = momentum
        self.register_buffer("running_mean", torch.zeros(channels, height, width // 2 + 1))
        frequencies = torch.fft.fftfreq(height), torch.fft.rfftfreq(width)
        down, across = (f.abs() <= band + 1e-6 for f in frequencies)
        constants = {
            "normalised": down[:, None] & across,
            "mean": torch.tensor(mean).view(-1, 1, 1),
            "std": torch.tensor(std).view(-1, 1, 1),
        }
        for name, value in constants.items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Replace the amplitude, keep the phase."""
        spectrum = torch.fft.rfft2(x * self.std + self.mean)
        amplitude = spectrum.abs()
        if self.training and self.track_running_stats:
            mean = amplitude.detach().mean(0)
            self.running_mean.lerp_(mean, self.momentum if self.batches else 1.0)
            self.batches += 1
        replaced = self.normalised & (self.running_mean > 0)
        amplitude = torch.where(replaced, self.running_mean, amplitude)
        x = torch.fft.irfft2(torch.polar(amplitude, spectrum.angle()), x.shape[-2:])
        x = (x - self.mean) / self.std
        # In channels-last memory order, as `Images` deals them; vmap knows no other way there.
        return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def _normalise(model: nn.Module, *layer: Any) -> None:
    """Put an `AmplitudeNorm` of these arguments before a model; once is enough."""
    if isinstance(model, nn.Sequential):
        raise TypeError(
            "HarmoFL gives the model a layer, which an nn.Sequential would take for its last. "
            "Give it a module with a forward of its own."
        )
    if not hasattr(model, "amplitude_norm"):
        model.amplitude_norm = AmplitudeNorm(*layer)
        model.register_forward_pre_hook(_with_common_amplitude)


def _with_common_amplitude(model: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (model.amplitude_norm(*inputs),)
