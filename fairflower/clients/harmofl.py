"""HarmoFL (Jiang, Wang, Dou, AAAI 2022)."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import Tensor, nn

from fairflower.arguments import Range, Search
from fairflower.data import Federation
from fairflower.training.trainer import Trainer


class HarmoFL(Trainer):
    """Local training on images with a common amplitude spectrum, towards flat minima.

    **Amplitude normalization.** Let P be the phase of an image's Fourier transform. In training and
    in testing, the images of all clients are given the same amplitude A_mean::

        x <- F^-1(A_mean exp(i P))

    In the first round, client k computes a running mean over its batches,
    ``A_k <- (1 - momentum) A_k + momentum * (mean of the batch)``, and normalizes with it. The
    server averages the A_k to obtain A_mean, which stays fixed after this round. A_mean is a buffer
    of the model (`AmplitudeNorm`): it is sent, averaged and saved with the model.

    **Weight perturbation.** A step uses the gradient at ``w + alpha g / ||g||``, like SAM with
    radius alpha (`fairflower.training.trainer.apply_sam_gradient`); ``train.rho`` is not used. The
    paper trains with SGD, momentum 0.9 and weight decay 1e-4.

    Parameters
    ----------
    alpha
        Radius of the weight perturbation. Default 0.05 (released code).
    momentum
        Weight of a new batch in the running mean. Default 0.1 (released code).
    band
        Highest frequency to normalize, in cycles per pixel, vertically and horizontally. Default
        0.5, which includes all frequencies, as the paper's equations do.

    See Also
    --------
    FedSAM : Only the weight perturbation.

    Notes
    -----
    The paper averages the A_k with equal weights; here their weights are those of the models. If
    the first round's step is shorter than the mean update (q-FedAvg, ``dq-ffl``, or a bound such
    as ``bound.clip-update-norm``), A_mean is shorter than the A_k in the same way. As in the
    released code, the running mean starts with the mean of the first batch. The released code
    normalizes only the zero frequency, the image's mean color, as ``band = 0`` does, and keeps each
    client's optimizer over the rounds. It also declares its momentum option as an integer, so that
    the value 0.1 becomes 0 or is rejected.

    Examples
    --------
    >>> from fairflower.clients.harmofl import HarmoFL
    >>> from fairflower.testing.federations import SETTINGS, data, tiny_model
    >>> client = HarmoFL(tiny_model(), data(), SETTINGS, client_id=0, seed=0)
    >>> _ = client.train(server_round=1)
    >>> client.send()["amplitude_norm.running_mean"].shape
    (1, 8, 5)
    """

    paper = "Jiang, Wang, Dou, AAAI 2022"
    kinds = ("images",)
    sharpness = "sam"
    mean_of = "batch"
    secure_aggregation_problem = "its mean amplitudes start at 0 and are too large to be masked"

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
        # A trainer of another client may have used this model, and its round may have failed.
        HarmoFL.end(self, 0)

    @classmethod
    def adapt(cls, model: nn.Module, federation: Federation, **arguments: Any) -> None:
        """Add the normalization layer to a network, with an empty running mean."""
        shape, mean, std = federation.shape, federation.mean, federation.std
        _normalise(model, shape, mean, std, arguments["momentum"], arguments["band"])

    def begin(self, server_round: int) -> None:
        """Start a running mean if there is no common amplitude yet."""
        layer: Any = self.model.amplitude_norm
        layer.track_running_stats = not bool(layer.running_mean.any())
        layer.batches = 0

    def represent(self, x: Tensor) -> Tensor:
        # The layer is in front of the model, not of its features.
        return super().represent(self.model.amplitude_norm(x))  # type: ignore[operator]

    def end(self, server_round: int) -> None:
        """Keep the mean: only training changes it."""
        layer: Any = self.model.amplitude_norm
        layer.track_running_stats = False


class AmplitudeNorm(nn.Module):
    """Layer that replaces the amplitude of normalized images [N, C, H, W] by ``running_mean``.

    The layer works on the original intensities in [0, 1]. In a centered image, the phase of the
    zero frequency would tell whether the image is dark or bright.

    Parameters
    ----------
    shape
        C, H, W.
    mean, std
        Mean and standard deviation per channel with which the images were normalized.
    momentum, band
        See `HarmoFL`.
    """

    mean: Tensor
    std: Tensor
    normalized: Tensor
    #: Mean amplitude [C, H, W // 2 + 1]; where it is 0, images keep their amplitude.
    running_mean: Tensor
    #: Whether training mode updates ``running_mean``.
    track_running_stats = False
    #: Number of batches in ``running_mean``; 0 starts a new mean.
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
            "normalized": down[:, None] & across,
            "mean": torch.tensor(mean).view(-1, 1, 1),
            "std": torch.tensor(std).view(-1, 1, 1),
        }
        for name, value in constants.items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the images with the common amplitude and their own phases."""
        spectrum = torch.fft.rfft2(x * self.std + self.mean)
        amplitude = spectrum.abs()
        if self.training and self.track_running_stats:
            mean = amplitude.detach().mean(0)
            self.running_mean.lerp_(mean, self.momentum if self.batches else 1.0)
            self.batches += 1
        replaced = self.normalized & (self.running_mean > 0)
        amplitude = torch.where(replaced, self.running_mean, amplitude)
        x = torch.fft.irfft2(torch.polar(amplitude, spectrum.angle()), x.shape[-2:])
        x = (x - self.mean) / self.std
        # Channels-last memory order, as from `Images`; under vmap only permute produces it.
        return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)


def _normalise(model: nn.Module, *layer: Any) -> None:
    """Add an `AmplitudeNorm` with these arguments in front of a model, unless it has one."""
    if isinstance(model, nn.Sequential):
        raise TypeError(
            "HarmoFL cannot add its normalization layer to an nn.Sequential, which would run this "
            "layer last. Pass a module that defines forward."
        )
    if not hasattr(model, "amplitude_norm"):
        model.amplitude_norm = AmplitudeNorm(*layer)
        model.register_forward_pre_hook(_with_common_amplitude)


def _with_common_amplitude(model: Any, inputs: tuple[Tensor]) -> tuple[Tensor]:
    return (model.amplitude_norm(*inputs),)
