"""FedGCR's network: forward passes, exchanged arrays, cached first stages, and weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.error import URLError

import numpy as np
import pytest
import torch
from invalid_files import Malicious
from pretrain_vit_tiny import to_text
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.models import ViT_B_16_Weights, vit_b_16
from torchvision.models.vision_transformer import VisionTransformer

from fairflower import models
from fairflower.clients import SGD, ClientData, Images, fisher_diagonal, mean_gradient
from fairflower.config import ModelConfig, RunConfig, TrainConfig
from fairflower.data import Augment, Split
from fairflower.errors import ConfigError
from fairflower.models import (
    cache_first_stage,
    cached_first_stage,
    copy_arrays,
    prompt_vit,
    set_arrays,
)
from fairflower.models.pretrained import decode_json_weights
from fairflower.models.prompt_vit import PromptViT, vit_tiny

SHIPPED = resources.files("fairflower.models").joinpath("vit_tiny.json")
SHA256 = "299227fdab47ded61b069dff5249e2235e55bcf8dec5268e54b2fc65f42e686e"
SHAPE = (3, 32, 32)
HALF = (0.5, 0.5, 0.5)


def prompt_vit_tiny(seed: int = 0, num_classes: int = 5) -> PromptViT:
    model = models.build("prompt-vit-tiny", num_classes, SHAPE, seed)
    assert isinstance(model, PromptViT)
    return model


def images(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, *SHAPE, generator=torch.Generator().manual_seed(seed))


def split(n: int, seed: int) -> Split:
    rng = np.random.default_rng(seed)
    return Split(rng.integers(0, 256, (n, *SHAPE), dtype=np.uint8), rng.integers(0, 5, n))


def data() -> ClientData:
    return ClientData(split(20, 0), split(9, 1), HALF, HALF, 5, Augment(4, True))


def trainer(model: nn.Module | None = None, held: ClientData | None = None) -> SGD:
    settings = TrainConfig(local_epochs=2, batch_size=8, lr=0.05)
    return SGD(model or prompt_vit_tiny(), held or data(), settings, client_id=0, seed=0)


# --- forward passes ------------------------------------------------------------------------


def tokens(vit: VisionTransformer, x: Tensor) -> Tensor:
    """Return the class token and the patches, as torchvision computes them."""
    return torch.cat([vit.class_token.expand(len(x), -1, -1), vit._process_input(x)], 1)


@torch.no_grad()
def test_the_first_stage_equals_torchvisions_transformer() -> None:
    model = prompt_vit_tiny().eval()
    torch.testing.assert_close(model.first_stage(images(3)), model.vit(images(3)))


@torch.no_grad()
def test_prompts_are_appended_without_positions() -> None:
    """torchvision's encoder adds positions to all tokens, so prompts get positions of 0."""
    model, x = prompt_vit_tiny().eval(), images(3)
    h = torch.randn(3, 128)
    z = model.prompted(x, h)
    encoder = model.vit.encoder
    sequence = torch.cat([tokens(model.vit, x), model.prompts + h[:, None]], 1)
    nowhere = torch.zeros(1, len(model.prompts), 128)
    encoder.pos_embedding = nn.Parameter(torch.cat([encoder.pos_embedding, nowhere], 1))
    torch.testing.assert_close(z, encoder(sequence)[:, 0])


@torch.no_grad()
def test_every_image_has_its_own_h() -> None:
    """The released code gives an image of a batch the h of four others."""
    model, x = prompt_vit_tiny().eval(), images(9)
    model.gc_net[2].weight.mul_(20)  # so that h has an effect
    singly = torch.cat([model(x[i : i + 1]) for i in range(len(x))])
    torch.testing.assert_close(model(x), singly, rtol=1e-4, atol=1e-5)
    h = model.type_prompt(x)
    foreign = model.head(model.prompted(x, h.roll(1, 0)))
    assert (foreign - singly).abs().max() > 0.01


@torch.no_grad()
def test_prompts_and_gc_net_have_the_shapes_of_the_paper() -> None:
    model = prompt_vit_tiny(num_classes=10)
    assert model.prompts.shape == (4, 128)
    assert [type(layer) for layer in model.gc_net] == [nn.Linear, nn.ReLU, nn.Linear]
    assert model.gc_net[0].weight.shape == (512, 128)
    assert model.gc_net[2].weight.shape == (128, 512)
    drawn = torch.stack([prompt_vit_tiny(seed).prompts for seed in range(8)])
    assert drawn.std().item() == pytest.approx(0.02, rel=0.1)
    assert abs(drawn.mean().item()) < 0.002


def test_vit_b_16_has_the_sizes_of_the_paper() -> None:
    with torch.device("meta"):
        model = PromptViT(vit_b_16(), 10, (3, 224, 224))
    count = {
        name: sum(p.numel() for p in part.parameters()) for name, part in model.named_children()
    }
    assert count["gc_net"] == 4_722_432
    assert count["vit"] == 85_798_656  # torchvision's 86,567,656 less its head of 1000 classes
    assert sum(a.numel() for a in model.exchanged_arrays().values()) == 4_722_432 + 4 * 768 + 7_690


@pytest.mark.parametrize("shape", [(1, 32, 32), (3, 16, 16), (1, 20, 13), (3, 64, 64)])
def test_images_of_other_sizes_and_gray_images_are_resized(shape: tuple[int, int, int]) -> None:
    model = models.build("prompt-vit-tiny", 5, shape, seed=0).eval()
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    fitted = F.interpolate(x.expand(-1, 3, -1, -1), (32, 32), mode="bilinear", antialias=True)
    torch.testing.assert_close(model(x), prompt_vit_tiny().eval()(fitted))


def test_images_of_four_channels_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"the data have 4\."):
        models.build("prompt-vit-tiny", 5, (4, 32, 32), seed=0)


# --- trained and exchanged arrays ---------------------------------------------------


def test_only_prompts_gc_net_and_head_get_gradients() -> None:
    model = prompt_vit_tiny().train()
    F.cross_entropy(model(images(4)), torch.tensor([0, 1, 2, 3])).backward()
    for name, parameter in model.named_parameters():
        if name.startswith("vit."):
            assert not parameter.requires_grad
            assert parameter.grad is None
        else:
            assert parameter.grad is not None
            assert parameter.grad.abs().sum() > 0, name


def test_training_leaves_the_transformer_unchanged() -> None:
    client = trainer()
    model = client.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    client.train(1)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("vit."), name


def test_the_trained_arrays_are_sent() -> None:
    client = trainer()
    trained = {n: p for n, p in client.model.named_parameters() if p.requires_grad}
    sent = client.send()
    assert list(sent) == list(trained)
    assert sum(array.nbytes for array in sent.values()) == 4 * sum(
        map(Tensor.numel, trained.values())
    )


def test_the_received_arrays_determine_the_result() -> None:
    """Two workers with models of different seeds get identical results."""
    arrays = trainer(prompt_vit_tiny(7)).send()
    results = []
    for seed in (0, 1):
        client = trainer(prompt_vit_tiny(seed))
        client.receive(arrays)
        client.train(3)
        results.append(client.send())
    assert all(np.array_equal(results[0][name], results[1][name]) for name in arrays)


def test_received_arrays_of_the_transformer_are_refused() -> None:
    client = trainer()
    arrays = client.send() | {"vit.class_token": np.zeros((1, 1, 128), np.float32)}
    with pytest.raises(ValueError, match=r"Unknown: vit\.class_token"):
        client.receive(arrays)


def test_set_arrays_requires_exactly_the_exchanged_arrays() -> None:
    model, arrays = prompt_vit_tiny(0), copy_arrays(prompt_vit_tiny(1))
    set_arrays(model, arrays, "it")
    assert all(np.array_equal(a, arrays[name]) for name, a in copy_arrays(model).items())
    with pytest.raises(ValueError, match=r"it: .* Missing: prompts"):
        set_arrays(model, {name: a for name, a in arrays.items() if name != "prompts"}, "it")
    with pytest.raises(ValueError, match=r"Unknown: more"):
        set_arrays(model, {**arrays, "more": np.zeros(1)}, "it")


def test_measured_gradients_cover_the_exchanged_arrays() -> None:
    model, x = prompt_vit_tiny().eval(), images(5)
    y = torch.tensor([0, 4, 2, 1, 1])
    model.gc_net[1] = nn.Tanh()  # rounding could switch a ReLU
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    each = [
        torch.autograd.grad(
            F.cross_entropy(model(x[i : i + 1]), y[i : i + 1]),
            [p for p in model.parameters() if p.requires_grad],
        )
        for i in range(len(x))
    ]
    fisher, gradient = fisher_diagonal(model, [(x, y)]), mean_gradient(model, [(x, y)])
    assert list(fisher) == list(gradient) == names == list(model.exchanged_arrays())
    for k, name in enumerate(names):
        stacked = torch.stack([gradients[k] for gradients in each])
        square, mean = stacked.square().mean(0), stacked.mean(0)
        largest = square.max().item()
        torch.testing.assert_close(fisher[name], square, rtol=1e-3, atol=1e-4 * largest)
        torch.testing.assert_close(gradient[name], mean, rtol=1e-3, atol=1e-4 * largest**0.5)


# --- without GC-Net ----------------------------------------------------------------------


def vpt_vit_tiny(seed: int = 0, num_classes: int = 5) -> PromptViT:
    model = models.build("vpt-vit-tiny", num_classes, SHAPE, seed)
    assert isinstance(model, PromptViT)
    return model


@torch.no_grad()
def test_vpt_equals_the_network_with_a_zero_gc_net() -> None:
    """With the same seed, both have the same prompts and head."""
    whole, base, x = prompt_vit_tiny(3).eval(), vpt_vit_tiny(3).eval(), images(6)
    gc_net = whole.gc_net
    assert gc_net is not None
    assert not torch.equal(whole(x), base(x))
    gc_net[2].weight.zero_()
    gc_net[2].bias.zero_()
    assert torch.equal(whole(x), base(x))
    assert torch.equal(whole.features(x), base.features(x))


@torch.no_grad()
def test_vpt_is_visual_prompt_tuning() -> None:
    """torchvision's encoder with the prompts appended, without positions for them."""
    base, x = vpt_vit_tiny().eval(), images(3)
    encoder = base.vit.encoder
    sequence = torch.cat([tokens(base.vit, x), base.prompts.expand(3, -1, -1)], 1)
    nowhere = torch.zeros(1, len(base.prompts), 128)
    expected = base.features(x)
    encoder.pos_embedding = nn.Parameter(torch.cat([encoder.pos_embedding, nowhere], 1))
    torch.testing.assert_close(expected, encoder(sequence)[:, 0])


def test_vpt_trains_and_sends_only_prompts_and_head() -> None:
    client = trainer(vpt_vit_tiny())
    names = ["prompts", "head.weight", "head.bias"]
    assert [n for n, p in client.model.named_parameters() if p.requires_grad] == names
    before = {name: value.clone() for name, value in client.model.state_dict().items()}
    F.cross_entropy(client.model(images(4)), torch.tensor([0, 1, 2, 3])).backward()
    reached = {n for n, p in client.model.named_parameters() if p.grad is not None and p.grad.any()}
    assert reached == set(names)
    client.train(1)
    changed = {n for n, a in client.model.state_dict().items() if not torch.equal(a, before[n])}
    assert changed == set(names)
    sent = client.send()
    assert list(sent) == names
    assert sum(array.nbytes for array in sent.values()) == 4 * (4 * 128 + 5 * 128 + 5)


@torch.no_grad()
def test_the_representation_of_vpt_is_the_first_stage() -> None:
    """One vector per image, independent of the other images and of training."""
    whole, client = prompt_vit_tiny().eval(), trainer(vpt_vit_tiny())
    base, x = client.model, images(6)
    assert isinstance(base, PromptViT)
    h = base.represent(x)
    assert h.shape == (6, 128)
    assert torch.equal(h, whole.first_stage(x))
    singly = torch.cat([base.represent(x[i : i + 1]) for i in range(6)])
    torch.testing.assert_close(h, singly, rtol=1e-4, atol=1e-5)
    assert h.std(0).min() > 0
    with torch.enable_grad():
        client.train(1)
    assert torch.equal(base.represent(x), h)


def test_vpt_vit_b_16_trains_only_prompts_and_head(monkeypatch: pytest.MonkeyPatch) -> None:
    weights: dict[str, Tensor] = {}
    monkeypatch.setattr(ViT_B_16_Weights, "get_state_dict", lambda *args, **options: weights)
    monkeypatch.setattr(prompt_vit, "copy_into", lambda *args: None)
    with torch.device("meta"):
        model = prompt_vit.vpt_vit_b_16(10, (3, 224, 224))
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == 10_762
    assert sum(a.numel() for a in model.exchanged_arrays().values()) == 4 * 768 + 7_690
    assert sum(p.numel() for p in model.vit.parameters()) == 85_798_656


# --- cached first stages --------------------------------------------------------------------


class Counting:
    """Count the images that go through a transformer, with and without prompts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = {"first": 0, "prompted": 0}
        original = PromptViT._class_token

        def count(model: PromptViT, x: Tensor, prompts: Tensor | None = None) -> Tensor:
            self.count["first" if prompts is None else "prompted"] += len(x)
            return original(model, x, prompts)

        monkeypatch.setattr(PromptViT, "_class_token", count)


def test_the_first_stage_processes_an_image_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counting, model, held = Counting(monkeypatch), prompt_vit_tiny(), data()
    for server_round in (1, 2, 3):  # a trainer per message, as the client app makes them
        client = trainer(model, held)
        client.train(server_round)
        client.evaluate(client.train_examples)
        client.test()
    assert counting.count == {"first": 20 + 9, "prompted": 3 * (2 * 20 + 20 + 9)}


def test_cached_first_stages_equal_recomputed_ones() -> None:
    model, held = prompt_vit_tiny().eval(), data()
    noted = Images(
        held.train, HALF, HALF, held.augment, model=model, first_stages=held.first_stages
    )
    plain = Images(held.train, HALF, HALF)
    draws = [torch.Generator().manual_seed(1) for _ in range(2)]
    pairs = [
        *zip(noted.eval_batches(7), plain.eval_batches(7), strict=True),
        *zip(noted.epoch_batches(8, draws[0]), plain.epoch_batches(8, draws[1]), strict=True),
    ]
    with torch.no_grad():
        for (x, y), (again, labels) in pairs:
            assert torch.equal(x, again)  # not augmented
            assert torch.equal(y, labels)
            assert cached_first_stage(again) is None
            known = cached_first_stage(x)
            assert known is not None
            torch.testing.assert_close(known, model.first_stage(again))


def test_another_model_has_its_own_cache() -> None:
    held = data()
    one, other = prompt_vit_tiny(), prompt_vit_tiny()
    with torch.no_grad():
        other.vit.class_token.add_(1)
    seen = []
    for model in (one, other):
        client = trainer(model, held)
        (x, _) = next(client.train_examples.eval_batches(20))
        seen.append(cached_first_stage(x))
        torch.testing.assert_close(cached_first_stage(x), model.first_stage(x.clone()))
    assert not torch.equal(seen[0], seen[1])


def test_a_changed_batch_is_not_cached() -> None:
    model, x = prompt_vit_tiny().eval(), images(2)
    cache_first_stage(x, torch.zeros(2, 128))
    assert not model.first_stage(x).any()
    assert cached_first_stage(x + 0) is None
    assert cached_first_stage(x[:1]) is None
    x.mul_(1)
    assert cached_first_stage(x) is None
    assert model.first_stage(x).any()


def test_training_works_after_testing() -> None:
    """Cached tensors may come from inference mode, which training could not use."""
    client = trainer()
    with torch.inference_mode():
        client.evaluate(client.train_examples)
    assert np.isfinite(client.train(1)["train_loss"])


# --- weights ------------------------------------------------------------------------------


def test_the_shipped_weights_have_the_known_hash() -> None:
    """Made by experiments/pretrain_vit_tiny.py."""
    text = SHIPPED.read_bytes()
    assert hashlib.sha256(text).hexdigest() == SHA256
    assert len(text) <= 3 * 2**20
    assert isinstance(json.loads(text), dict)
    arrays = decode_json_weights(text.decode("ascii"))
    assert sum(p.numel() for p in vit_tiny().parameters()) < 1_000_000
    state = prompt_vit_tiny().vit.state_dict()
    assert state.keys() == arrays.keys()
    assert all(torch.equal(state[name], arrays[name]) for name in state)


@pytest.mark.slow
def test_the_shipped_weights_classify_printed_digits() -> None:
    """Fonts held out of pretraining, classified by the nearest class mean of features."""
    from fairflower.published.uci_digits import generate

    splits = generate()
    model = prompt_vit_tiny().eval()

    def features(split: str) -> tuple[Tensor, Tensor]:
        x, y = splits["printed", split]
        batch = torch.tensor(x).permute(0, 3, 1, 2).float() / 127.5 - 1
        return F.normalize(model.first_stage(batch)), torch.tensor(y)

    (known, labels), (x, y) = features("train"), features("test")
    means = torch.stack([known[labels == c].mean(0) for c in range(10)])
    predicted = (x @ F.normalize(means).T).argmax(1)
    assert (predicted == y).float().mean() > 0.8


def test_json_weights_keep_shapes_integers_and_three_digits() -> None:
    arrays = {"a": torch.randn(3, 4), "n": torch.tensor(2**40), "z": torch.zeros(0, 2)}
    back = decode_json_weights(to_text(arrays))
    assert back.keys() == arrays.keys()
    assert back["n"].dtype == torch.int64
    assert torch.equal(back["n"], arrays["n"])
    assert back["z"].shape == (0, 2)
    torch.testing.assert_close(back["a"], arrays["a"], rtol=5e-4, atol=1e-7)
    assert to_text(back) == to_text(arrays)


def other_weights() -> Mapping[str, Tensor]:
    torch.manual_seed(5)
    return vit_tiny(7).state_dict()  # with a head, as published weights have one


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
def test_weights_are_loaded_from_a_file(tmp_path: Path, suffix: str) -> None:
    arrays, path = dict(other_weights()), tmp_path / f"weights{suffix}"
    save_file(arrays, path) if suffix == ".safetensors" else torch.save(arrays, path)
    model = models.build("prompt-vit-tiny", 5, SHAPE, seed=0, weights=str(path))
    assert isinstance(model, PromptViT)
    state = model.vit.state_dict()
    assert state.keys() == {name for name in arrays if not name.startswith("heads.")}
    assert all(torch.equal(state[name], arrays[name]) for name in state)


def wrong_files(folder: Path) -> dict[str, str]:
    torch.save(Malicious(), folder / "pickle.pth")
    torch.save([torch.zeros(2)], folder / "list.pth")
    (folder / "text.safetensors").write_text("not weights")
    (folder / "text.pth").write_text("not weights")
    save_file({"conv.weight": torch.zeros(2)}, folder / "cnn.safetensors")
    return {
        "pickle.pth": "state dict of tensors",
        "list.pth": "expected a state dict of tensors, got list",
        "text.safetensors": "Expected a .safetensors file",
        "text.pth": "Expected a .safetensors file",
        "cnn.safetensors": "another network.*class_token",
        "missing.pth": "file not found",
        "missing.safetensors": "file not found",
    }


def test_a_wrong_weights_file_is_refused_and_not_executed(tmp_path: Path) -> None:
    for name, reason in wrong_files(tmp_path).items():
        path = str(tmp_path / name)
        with pytest.raises(ConfigError, match=rf"(?s)model\.weights = '.*{name}.*{reason}"):
            models.build("prompt-vit-tiny", 5, SHAPE, seed=0, weights=path)


def test_vit_tiny_has_no_imagenet_weights() -> None:
    with pytest.raises(ConfigError, match=r"model\.weights = 'imagenet'"):
        models.build("prompt-vit-tiny", 5, SHAPE, seed=0, weights="imagenet")


@pytest.mark.parametrize("weights", ["", "imagenet"])
def test_a_failed_download_names_the_address_and_the_setting(
    monkeypatch: pytest.MonkeyPatch, weights: str
) -> None:
    def fail(*args: Any, **options: Any) -> None:
        assert options["weights_only"]
        raise URLError("no route to host")

    monkeypatch.setattr(ViT_B_16_Weights, "get_state_dict", fail)
    monkeypatch.setattr("torchvision.models.vit_b_16", vit_tiny)  # instead of the large one
    with pytest.raises(ConfigError, match=r"no route.*https://.*vit_b_16.*model\.weights"):
        models.build("prompt-vit-b-16", 5, SHAPE, seed=0, weights=weights)


def test_weights_are_refused_for_models_without_pretrained_weights() -> None:
    with pytest.raises(
        ConfigError, match=r"model\.weights = 'x\.pth': cnn does not support pretrained weights"
    ):
        RunConfig.from_flat({"model.weights": "x.pth"})
    RunConfig.from_flat({"model.name": "prompt-vit-tiny", "model.weights": "x.pth"})


def test_a_relative_weights_path_becomes_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    resolved = ModelConfig("prompt-vit-tiny", "x.pth").resolve()
    assert resolved.weights == str(tmp_path / "x.pth")
    for word in ("", "imagenet"):
        assert ModelConfig("prompt-vit-b-16", word).resolve().weights == word
