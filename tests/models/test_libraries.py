"""Networks of timm and transformers, whole and with adapters; all with random weights."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parametrize import mark_others_nightly
from safetensors.torch import save_file
from torch.nn import functional as F

from fairflower import models
from fairflower.config import ModelConfig, RunConfig
from fairflower.errors import ConfigError, NotInstalled, installed
from fairflower.models import copy_arrays, set_arrays, trainable
from fairflower.models.libraries import swap_padding
from fairflower.tasks import task_of
from fairflower.testing import check_model
from fairflower.training.fisher import fisher_diagonal
from fairflower.training.gradients import mean_gradient

# Not imported here: all test processes collect this file, and one of them runs it.
LIBRARIES = ("timm", "peft", "transformers")
pytestmark = pytest.mark.skipif(
    not all(map(installed, LIBRARIES)), reason="needs fairflower[timm,hf]"
)

COLOR, GRAY, TEXTS = (3, 32, 32), (1, 20, 13), (50, 12)
SMALL = {"vocab_size": 50, "max_position_embeddings": 20}
WIDTHS: dict[str, dict[str, Any]] = {
    "bert": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "roberta": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2, "bos_token_id": 1, "eos_token_id": 1,
             "pad_token_id": 0},
}  # fmt: skip
IMAGE_SIZES: dict[str, dict[str, Any]] = {
    "vit": {"image_size": 16, "patch_size": 8, **WIDTHS["bert"], "intermediate_size": 32},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the folder of a network with random weights, by its type."""

    import transformers

    def create(kind: str, **options: Any) -> Path:
        path = tmp_path_factory.mktemp(kind)
        images = kind in IMAGE_SIZES
        sizes = IMAGE_SIZES[kind] if images else WIDTHS[kind] | SMALL
        auto = transformers.AutoModelForImageClassification
        if not images:
            auto = transformers.AutoModelForSequenceClassification
        config = transformers.AutoConfig.for_model(kind, num_labels=2, **sizes | options)
        with torch.random.fork_rng():
            torch.manual_seed(7)
            auto.from_config(config).save_pretrained(path)
        return path

    return create


def build(name: str, shape: tuple[int, ...] = COLOR, **options: Any) -> Any:
    return models.build(name, 3, shape, options.pop("seed", 0), **options)


def batch(shape: tuple[int, ...], count: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(1)
    y = torch.arange(count) % 3
    if len(shape) == 3:
        return torch.randn(count, *shape, generator=draws), y
    x = torch.randint(1, shape[0], (count, shape[1]), generator=draws)
    x[1, 5:] = 0  # a short text
    return x, y


def check(name: str, shape: tuple[int, ...], **options: Any) -> None:
    def factory(_: int, shape: tuple[int, ...]) -> Any:
        return build(name, shape, seed=torch.initial_seed(), **options)

    factory.kinds = ("images", "tokens")  # type: ignore[attr-defined]
    check_model(factory, shape)


def check_adapted(name: str, shape: tuple[int, ...], adapter: str, **options: Any) -> Any:
    """Run `check_model` and further checks on a network with an adapter; return it."""
    check(name, shape, adapter=adapter, **options)
    model = build(name, shape, adapter=adapter, **options)
    sent = set(copy_arrays(model))
    assert sent == set(trainable(model))
    assert {"head.weight", "head.bias"} < sent
    assert all("lora_" in key for key in sent if key.startswith("body.") and "class" not in key)
    x, y = batch(shape)
    gradient, fisher = mean_gradient(model, [(x, y)]), fisher_diagonal(model, [(x, y)])
    assert set(gradient) == set(fisher) == sent
    with torch.no_grad():
        before = model.eval()(x)
        optimizer = torch.optim.SGD(trainable(model).values(), lr=0.5)
    F.cross_entropy(model.train()(x), y).backward()
    optimizer.step()
    assert not torch.equal(before, model.eval()(x))
    return model


# --- timm -------------------------------------------------------------------------------


@pytest.mark.few(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "shape"),
    mark_others_nightly(
        [*product(("test_vit", "test_resnet"), (COLOR, GRAY)), ("test_convnext", COLOR)],
        {("test_vit", GRAY), ("test_resnet", COLOR), ("test_convnext", COLOR)},
    ),
)
def test_timm_networks_pass_check_model(name: str, shape: tuple[int, int, int]) -> None:
    size = 32 if name == "test_vit" else 0
    name = f"timm:{name}:image-size={size}"
    check(name, shape, weights="random")
    model = build(name, shape, weights="random")
    assert set(copy_arrays(model)) == set(model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "targets"), [("test_vit:image-size=32", "qkv,proj"), ("test_resnet", "conv2")]
)
def test_lora_on_timm_networks_trains_adapters_and_head(name: str, targets: str) -> None:
    adapter = f"lora:r=2:targets={targets}"
    model = check_adapted(f"timm:{name}", COLOR, adapter, weights="random")
    plain = build(f"timm:{name}", weights="random")
    sizes = [sum(p.numel() for p in trainable(m).values()) for m in (model, plain)]
    assert sizes[0] < sizes[1] / 5
    x, _ = batch(COLOR)
    fresh = build(f"timm:{name}", weights="random", adapter=adapter)
    assert torch.equal(fresh.eval()(x), plain.eval()(x))  # B is 0 at first


def test_frozen_batch_norm_statistics_do_not_change() -> None:
    model = build("timm:test_resnet", weights="random", adapter="lora:targets=conv2")
    before = {key: a.clone() for key, a in model.state_dict().items()}
    x, y = batch(COLOR)
    F.cross_entropy(model.train()(x), y).backward()
    assert all(torch.equal(before[key], a) for key, a in model.state_dict().items())


def test_timm_loads_weights_from_a_file_for_any_image_size(tmp_path: Path) -> None:
    import timm as library

    whole = library.create_model("test_vit", num_classes=1000)
    path = tmp_path / "test_vit.safetensors"
    save_file(whole.state_dict(), path)
    model = build("timm:test_vit", weights=str(path)).eval()
    whole.reset_classifier(0)
    x = batch((3, 160, 160))[0]
    torch.testing.assert_close(model.features(x), whole.eval()(x))
    small = build("timm:test_vit:image-size=32", weights=str(path))
    assert small.features(batch(COLOR)[0]).shape == (4, 64)
    with pytest.raises(ConfigError, match=r"weights belong to another network.*timm's test_vit2"):
        build("timm:test_vit2", weights=str(path))


def test_missing_timm_weights_name_the_download_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(
        ConfigError,
        match=r"not on this machine.*hf download timm/test_vit\.r160_in1k model.*random\.",
    ):
        build("timm:test_vit")
    with pytest.raises(ConfigError, match=r"no network 'test_vitt'\. Did you mean .*test_vit"):
        build("timm:test_vitt", weights="random")


# --- prompts ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["test_vit", pytest.param("test_vit2", marks=pytest.mark.nightly), "test_vit3"]
)
def test_prompts_work_with_any_timm_vit(name: str) -> None:
    """With a class token, and with an average of tokens and registers."""
    for family in ("prompt-timm", "vpt-timm"):
        check(f"{family}:{name}:image-size=32", COLOR, weights="random")
    model = build(f"prompt-timm:{name}:image-size=32", weights="random").eval()
    assert {key.partition(".")[0] for key in copy_arrays(model)} == {"prompts", "gc_net", "head"}
    x, _ = batch(COLOR)
    torch.testing.assert_close(model.first_stage(x), model.vit(x))
    assert not torch.equal(model.features(x), model.vit(x))


def test_prompts_require_a_vit_and_fedgc_requires_prompt_timm() -> None:
    with pytest.raises(ConfigError, match=r"need a Vision Transformer .* this is a ResNet"):
        build("prompt-timm:test_resnet", weights="random")
    flat = {"client.name": "fedgc", "model.weights": "random"}
    RunConfig.from_flat(flat | {"model.name": "prompt-timm:test_vit"})
    with pytest.raises(ConfigError, match=r"FedGC trains .* or prompt-timm:NAME"):
        RunConfig.from_flat(flat | {"model.name": "vpt-timm:test_vit"})


# --- transformers -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", mark_others_nightly([(kind,) for kind in WIDTHS], [("bert",), ("roberta",)])
)
def test_transformers_text_classifiers_pass_check_model(folder: Any, kind: str) -> None:
    name = f"hf:{folder(kind)}"
    check(name, TEXTS)
    model = check_adapted(name, TEXTS, "lora:r=2")
    exchanged_arrays = {key for key in copy_arrays(model) if "lora_" not in key}
    above = {"distilbert": {"body.pre_classifier"}, "roberta": {"body.classifier.dense"}}
    modules = {key.rpartition(".")[0].removesuffix(".base_layer") for key in exchanged_arrays}
    assert modules == {"head"} | above.get(kind, set())


@pytest.mark.slow
@pytest.mark.parametrize("kind", IMAGE_SIZES)
def test_transformers_image_classifiers_pass_check_model(folder: Any, kind: str) -> None:
    name = f"hf:{folder(kind)}"
    check(name, COLOR)
    adapter = "lora:r=2" if kind == "vit" else "lora:r=2:targets=layer.0.convolution"
    check_adapted(name, GRAY, adapter)


def test_a_text_classifier_matches_transformers(folder: Any) -> None:
    """With another padding id, the same weights and another head."""
    import transformers

    path = folder("roberta")
    model = build(f"hf:{path}", TEXTS).eval()
    whole = transformers.AutoModelForSequenceClassification.from_pretrained(
        path, num_labels=3, ignore_mismatched_sizes=True
    )
    whole.classifier.load_state_dict(
        {
            **model.body.classifier.state_dict(),
            "out_proj.weight": model.head.weight,
            "out_proj.bias": model.head.bias,
        }
    )
    x, _ = batch(TEXTS)
    ids = swap_padding(x, 1)
    logits = whole.eval()(input_ids=ids, attention_mask=(x != 0).long()).logits
    torch.testing.assert_close(model(x), logits)
    padded = F.pad(x, (0, 3))
    torch.testing.assert_close(model(padded), model(x))


def test_weights_random_ignores_stored_weights(folder: Any) -> None:
    import transformers

    path = folder("bert")
    pretrained, random = (build(f"hf:{path}", TEXTS, weights=w) for w in ("", "random"))
    key = "body.bert.embeddings.word_embeddings.weight"
    stored = transformers.AutoModelForSequenceClassification.from_pretrained(path).state_dict()
    assert torch.equal(pretrained.state_dict()[key], stored[key.removeprefix("body.")])
    assert not torch.equal(random.state_dict()[key], stored[key.removeprefix("body.")])
    (path / "model.safetensors").unlink()
    again = build(f"hf:{path}", TEXTS, weights="random", seed=5)
    assert torch.equal(again.state_dict()[key], random.state_dict()[key])
    with pytest.raises(ConfigError, match=r"cannot be read.*model\.weights = 'random'"):
        build(f"hf:{path}", TEXTS)


def test_custom_code_of_a_network_is_not_executed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text("raise SystemExit(3)")
    own = {"model_type": "own", "auto_map": {"AutoConfig": "own.Mine"}}
    (tmp_path / "config.json").write_text(json.dumps(own))
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    with pytest.raises(ConfigError, match=r"cannot be read as a network: .*contains custom code"):
        build(f"hf:{tmp_path}", TEXTS)


def test_transformers_errors_name_the_problem(folder: Any) -> None:
    with pytest.raises(ConfigError, match=r"neither a folder.*hf download no-one/nothing\. .*hf:F"):
        build("hf:no-one/nothing", TEXTS)
    path = folder("bert")
    with pytest.raises(ConfigError, match="transformers has no bert classifier for images"):
        build(f"hf:{path}", COLOR)
    with pytest.raises(ConfigError, match="has 50 token ids, but the data have 60"):
        build(f"hf:{path}", (60, 12))
    with pytest.raises(
        ConfigError, match=r"accepts at most 20 tokens, but the texts have 30.*length=20"
    ):
        build(f"hf:{path}", (50, 30))
    # RoBERTa's first position is padding_idx + 1 = 2.
    roberta = f"hf:{folder('roberta')}"
    assert build(roberta, (50, 18))(torch.ones(1, 18, dtype=torch.int64)).shape == (1, 3)
    with pytest.raises(ConfigError, match=r"accepts at most 18 tokens, but .* 19.*length=18"):
        build(roberta, (50, 19))
    for pad in (None, -1):  # for these, padding with 0 would be a token
        with pytest.raises(ConfigError, match=rf"found pad_token_id = {pad} in its config.json"):
            build(f"hf:{folder('gpt2', pad_token_id=pad)}", TEXTS)
    with pytest.raises(ConfigError, match=r"weights of 'hf:.*are always read from its folder"):
        build(f"hf:{path}", TEXTS, weights="/a/file.pth")
    config = path / "config.json"
    config.write_text(
        config.read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
    )
    with pytest.raises(ConfigError, match=r"its weights lack \d+ arrays \(bert\.encoder\.layer\.2"):
        build(f"hf:{path}", TEXTS)


# --- adapters ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("targets", "named"),
    [
        ("quarry", "'quarry'.*query, key, value, dense"),
        ("query,vale", "'vale'"),
        ("uery", "'uery'"),
    ],
)
def test_unknown_adapter_targets_list_the_layers(folder: Any, targets: str, named: str) -> None:
    with pytest.raises(ConfigError, match=rf"no layer is called {named}"):
        build(f"hf:{folder('bert')}", TEXTS, adapter=f"lora:targets={targets}")


def test_layers_that_peft_cannot_adapt_are_named() -> None:
    with pytest.raises(ConfigError, match=r"PEFT cannot adapt .*groups=24 and rank 8.*other targ"):
        build("timm:test_convnext", weights="random", adapter="lora:targets=conv_dw")


@pytest.mark.parametrize(
    ("flat", "message"),
    [
        ({"model.adapter": "lora"}, r"cnn does not support adapters\..*timm:NAME or hf:NAME"),
        ({"model.name": "timm:x", "model.adapter": "lorra"}, "Unknown adapter 'lorra'.*'lora'"),
        (
            {"model.name": "timm:x", "model.adapter": "lora:r=0"},
            r"r = 0: expected a whole number in \[1, 4096\]",
        ),
        ({"model.name": "timm:x", "model.adapter": "lora:r=1000000000"}, "r = 1000000000: expect"),
        ({"model.name": "timm:x", "model.adapter": "lora:dropout=1"}, r"1: .*in \[0, 0.99\]"),
        ({"model.name": "timm:x", "model.adapter": "lora:q=1"}, "argument of lora 'q'"),
        ({"model.name": "timm:x:depth=1"}, "argument of timm:x 'depth'.*image-size"),
        ({"model.name": "tim:x"}, "The model 'tim:x' cannot be imported"),
        ({"model.name": "timm:x", "data.name": "randhie"}, "accepts images, but the data are feat"),
    ],
)
def test_wrong_settings_are_named_in_the_error(flat: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RunConfig.from_flat(flat)


@pytest.mark.parametrize(
    ("name", "extra"), [("timm:test_vit", "timm"), ("hf:somewhere", "hf"), ("vpt-timm:x", "timm")]
)
def test_a_missing_library_is_named_with_its_extra(
    monkeypatch: pytest.MonkeyPatch, name: str, extra: str
) -> None:
    monkeypatch.setattr("fairflower.errors.installed", lambda library: False)
    shape = TEXTS if extra == "hf" else COLOR
    with pytest.raises(NotInstalled, match=rf'pip install "fairflower\[{extra}\]"'):
        build(name, shape, weights="random")


def test_receivers_of_all_arrays_load_no_weights() -> None:
    assert ModelConfig("timm:x").to_receive().weights == "random"
    assert ModelConfig("hf:x", adapter="lora").to_receive().weights == ""
    assert ModelConfig("hf:x", "random").file == ModelConfig("timm:x").file == ""


def test_a_relative_folder_becomes_absolute(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "net").mkdir()
    monkeypatch.chdir(tmp_path)
    resolved = ModelConfig("hf:net:dtype=float16").resolve()
    assert resolved.name == f"hf:{tmp_path}/net:dtype=float16"
    assert ModelConfig("hf:elsewhere/net").resolve().name == "hf:elsewhere/net"


# --- 16 bits ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
def test_networks_with_16_bits_are_exchanged_exactly(folder: Any, kind: str, dtype: str) -> None:
    name = f"hf:{folder(kind)}:dtype={dtype}"
    model, other = build(name, TEXTS), build(name, TEXTS, seed=1)
    key = f"body.{kind}.embeddings.word_embeddings.weight"
    assert model.state_dict()[key].dtype == getattr(torch, dtype)
    arrays = copy_arrays(model)
    assert arrays[key].dtype == (np.float16 if dtype == "float16" else np.float32)
    set_arrays(other, arrays, "other")
    assert all(torch.equal(a, other.state_dict()[k]) for k, a in model.state_dict().items())
    adapted = build(name, TEXTS, adapter="lora:r=2")
    assert {a.dtype for a in copy_arrays(adapted).values()} == {np.dtype(np.float32)}
    assert {p.dtype for p in trainable(adapted).values()} == {torch.float32}
    fisher = fisher_diagonal(adapted, [batch(TEXTS)])
    assert all(torch.isfinite(a).all() for a in fisher.values())


# --- per-sample gradients ---------------------------------------------------------------


@pytest.mark.parametrize("kind", WIDTHS)
def test_the_fisher_of_a_text_classifier_matches_single_samples(folder: Any, kind: str) -> None:
    """By layer with an adapter, and by samples of the whole network."""
    for adapter in ("lora:r=2", ""):
        model = build(f"hf:{folder(kind)}", TEXTS, adapter=adapter)
        draws = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in trainable(model).values():  # lora's B is 0 at first
                parameter += 0.1 * torch.randn(parameter.shape, generator=draws)
        x, y = batch(TEXTS, 5)
        fisher = fisher_diagonal(model, [(x, y)])
        single = [mean_gradient(model, [(x[k : k + 1], y[k : k + 1])]) for k in range(5)]
        for key, value in fisher.items():
            expected = torch.stack([gradient[key].square() for gradient in single]).mean(0)
            atol = 1e-4 * expected.max().item() + 1e-12
            torch.testing.assert_close(value, expected, rtol=1e-3, atol=atol)


# --- causal language models -------------------------------------------------------------

WIDTH = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
CAUSAL: dict[str, dict[str, Any]] = {
    "gpt2": WIDTHS["gpt2"],
    "llama": {**WIDTH, "intermediate_size": 32, "pad_token_id": 3},
    "gpt_neox": {**WIDTH, "intermediate_size": 32, "pad_token_id": 49},
    "opt": {**WIDTH, "ffn_dim": 32, "word_embed_proj_dim": 16, "pad_token_id": 1},
    "bert": {**WIDTH, "pad_token_id": 0},
}
NEXT = task_of("next-token")


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return the folder of a causal language model with random weights, by its type."""
    import transformers

    def create(kind: str, **options: Any) -> Path:
        path = tmp_path_factory.mktemp(kind)
        config = transformers.AutoConfig.for_model(kind, **SMALL | CAUSAL[kind] | options)
        with torch.random.fork_rng():
            torch.manual_seed(7)
            transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
        return path

    return create


def build_causal(path: Path, vocabulary: int = 50, **options: Any) -> Any:
    seed = options.pop("seed", 0)
    return models.build(f"hf:{path}", vocabulary, (vocabulary, 12), seed, task=NEXT, **options)


def texts(pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids as transformers has them, [N, L + 1], and as a data set does."""
    draws = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 50, (4, 13), generator=draws)
    raw[0, 3] = 0  # a word, unless it is the padding token
    raw[raw == pad] = 7
    raw[1, 6:] = pad  # a short text
    return raw, swap_padding(raw, pad)


@pytest.mark.parametrize(
    "kind", mark_others_nightly([(k,) for k in CAUSAL if k != "bert"], [("gpt2",), ("llama",)])
)
def test_the_loss_per_token_is_that_of_transformers(causal: Any, kind: str) -> None:
    """Also with a short text, with another padding token, and with token 0 as a word."""
    import transformers

    path = causal(kind)
    whole = transformers.AutoModelForCausalLM.from_pretrained(path).eval()
    raw, ids = texts(whole.config.pad_token_id)
    assert (ids == 0).sum() == 7
    assert (kind == "gpt2") == bool((raw != 0)[0, 3])
    expected = whole(
        input_ids=raw, attention_mask=(ids != 0).long(), labels=raw.where(ids != 0, -100)
    )
    model = build_causal(path).eval()
    with torch.no_grad():
        sums = NEXT.sums(model(ids[:, :-1]), ids[:, 1:])
    torch.testing.assert_close((sums["token_loss"] / sums["tokens"]).float(), expected.loss)
    hidden = whole.base_model(input_ids=raw[:1, :-1]).last_hidden_state.mean(1)
    torch.testing.assert_close(model.represent(ids[:1, :-1]), hidden)


@pytest.mark.parametrize(
    "kind", mark_others_nightly([(k,) for k in CAUSAL if k != "bert"], [("gpt2",), ("llama",)])
)
def test_lora_on_a_language_model_trains_adapters_only(causal: Any, kind: str) -> None:
    path = causal(kind)
    model, plain = build_causal(path, adapter="lora:r=2"), build_causal(path)
    sent = copy_arrays(model)
    assert set(sent) == set(trainable(model))
    assert all("lora_" in key for key in sent)
    assert not any(name in key for key in sent for name in ("lm_head", "embed_out"))
    _, ids = texts(model.pad)
    x, y = ids[:, :-1], ids[:, 1:]
    assert torch.equal(model.eval()(x), plain.eval()(x))  # B is 0 at first
    assert set(fisher_diagonal(model, [(x, y)], task=NEXT)) == set(sent)
    optimizer = torch.optim.SGD(trainable(model).values(), lr=0.5)
    NEXT.loss(model.train()(x), y).backward()
    optimizer.step()
    assert not torch.equal(model.eval()(x), plain(x))


def test_data_may_have_fewer_token_ids_than_a_language_model(causal: Any) -> None:
    for pad in (3, 45):
        path = causal("llama", pad_token_id=pad)
        x = torch.randint(1, 20, (2, 12), generator=torch.Generator().manual_seed(0))
        x[x == pad] = 5
        whole, some = build_causal(path).eval()(x), build_causal(path, 20).eval()(x)
        torch.testing.assert_close(some, whole[..., :20])


def test_language_models_that_do_not_fit_are_refused(causal: Any, folder: Any) -> None:
    with pytest.raises(ConfigError, match="output at a place depends on tokens after it"):
        build_causal(causal("bert"))
    with pytest.raises(ConfigError, match="transformers has no distilbert causal language model"):
        build_causal(folder("distilbert"))
    with pytest.raises(ConfigError, match=r"its weights lack \d+ arrays"):
        build_causal(folder("bert"))
    with pytest.raises(ConfigError, match="has 50 token ids, but the data have 60"):
        build_causal(causal("gpt2"), 60)
    with pytest.raises(ConfigError, match=r"has no head: .* choose another client\.name"):
        models.head_and_body(build_causal(causal("gpt2")))


def test_a_language_model_is_exchanged_whole_with_shared_weights_once(causal: Any) -> None:
    path = causal("gpt2")
    model, other = build_causal(path), build_causal(path, weights="random", seed=1)
    arrays = copy_arrays(model)
    assert "body.transformer.wte.weight" in arrays
    assert "body.lm_head.weight" not in arrays
    _, ids = texts(0)
    assert not torch.equal(model.eval()(ids[:, :-1]), other.eval()(ids[:, :-1]))
    set_arrays(other, arrays, "other")
    assert torch.equal(model(ids[:, :-1]), other(ids[:, :-1]))
