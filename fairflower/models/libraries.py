"""Networks from libraries: ``model.name = "timm:NAME"``, ``"hf:NAME"`` or ``"smp:NAME"``."""

import difflib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from fairflower.arguments import Range
from fairflower.arrays import swap_padding
from fairflower.errors import ConfigError, require
from fairflower.models import Classifier
from fairflower.models.pretrained import (
    BodyClassifier,
    as_rgb,
    copy_into,
    load_weights_file,
    resized,
    same_for_every_seed,
)
from fairflower.models.prompt_vit import PromptViT
from fairflower.models.small import mean_of_places
from fairflower.models.unet import Segmenter
from fairflower.registry import RANDOM_WEIGHTS

Dtype = Literal["float32", "float16", "bfloat16"]


class TimmClassifier(BodyClassifier):
    """A network from timm with a linear head.

    Gray images get three channels. Images are resized to ``image_size`` or, if the network accepts
    only a single size, to that size. They are normalized as the data set specifies, even if the
    network was pretrained with a different normalization.
    """

    def __init__(self, body: nn.Module, num_classes: int, size: tuple[int, int] | None) -> None:
        width = getattr(body, "head_hidden_size", None) or body.num_features
        super().__init__(body, int(width), num_classes)  # type: ignore[arg-type]
        self.size = size

    def features(self, x: Tensor) -> Tensor:
        return self.to_head(self.body(resized(as_rgb(x, "A network from timm"), self.size)))


class TimmPromptViT(PromptViT):
    """FedGCR's prompts for a frozen ViT from timm; see `PromptViT`.

    Prompts follow the tokens of the image. If a ViT averages tokens, it averages only the tokens of
    the image.
    """

    def __init__(
        self, vit: Any, num_classes: int, shape: tuple[int, int, int], gc_net: bool = True
    ) -> None:
        vit.hidden_dim = vit.embed_dim  # as torchvision calls it
        super().__init__(vit, num_classes, shape, gc_net)

    def _class_token(self, x: Tensor, prompts: Tensor | None = None) -> Tensor:
        vit: Any = self.vit
        x = resized(as_rgb(x, "A ViT"), tuple(vit.patch_embed.img_size))
        tokens = vit.norm_pre(vit.patch_drop(vit._pos_embed(vit.patch_embed(x))))
        count = tokens.shape[1]
        if prompts is not None:
            tokens = torch.cat([tokens, prompts], 1)
        for block in vit.blocks:
            tokens = block(tokens)
        return vit.forward_head(vit.norm(tokens)[:, :count], pre_logits=True)


def timm(
    name: str,
    num_classes: int,
    shape: tuple[int, ...],
    weights: str = "",
    *,
    image_size: Annotated[int, Range(0)] = 0,
) -> TimmClassifier:
    """Build the network for ``model.name = "timm:NAME"``.

    ``weights`` are empty for timm's pretrained weights in the local cache of the Hugging Face Hub
    (nothing is downloaded), a .safetensors or .pth file with weights of the network, or ``random``
    for random weights. ``image_size`` is the width and height to which images are resized. 0 means
    the network's size or, if it accepts any size, the size of the data.

    Raises ``ConfigError`` if timm does not have this network, or the weights are not available or
    belong to another network, and ``NotInstalled`` if timm is not installed.
    """
    body = _body(name, weights, image_size)
    accepted = getattr(getattr(body, "patch_embed", None), "img_size", None)
    size = (image_size, image_size) if image_size else None  # None: of any height and width
    if body.pretrained_cfg.get("fixed_input_size") and accepted:
        size = int(accepted[0]), int(accepted[1])
    return TimmClassifier(body, num_classes, size)


vars(timm).update(sent_whole=True, adaptable=True)


def prompt_timm(
    name: str,
    num_classes: int,
    shape: tuple[int, int, int],
    weights: str = "",
    gc_net: bool = True,
    *,
    image_size: Annotated[int, Range(0)] = 0,
) -> TimmPromptViT:
    """Build the network for ``model.name = "prompt-timm:NAME"``.

    ``weights`` and ``image_size`` are as in `timm`.

    Raises ``ConfigError`` if NAME is not a Vision Transformer in timm.
    """
    body = _body(name, weights, image_size)
    from timm.models.vision_transformer import VisionTransformer

    if not isinstance(body, VisionTransformer):
        raise ConfigError(
            f"model.name = 'prompt-timm:{name}': prompts need a Vision Transformer (vit_*, "
            f"deit_*), but this is a {type(body).__name__}. Choose a Vision Transformer, or "
            f"model.name = 'timm:{name}'."
        )
    return TimmPromptViT(body, num_classes, shape, gc_net)


def vpt_timm(
    name: str,
    num_classes: int,
    shape: tuple[int, int, int],
    weights: str = "",
    *,
    image_size: Annotated[int, Range(0)] = 0,
) -> TimmPromptViT:
    """Build the network for ``model.name = "vpt-timm:NAME"``, without GC-Net."""
    return prompt_timm(name, num_classes, shape, weights, gc_net=False, image_size=image_size)


def _body(name: str, weights: str, image_size: int) -> Any:
    require("timm", f"The network {name!r} from timm")
    import timm as library

    if not library.is_model(name):
        near = difflib.get_close_matches(name, library.list_models(), n=3)
        hint = f"Did you mean {' or '.join(near)}?" if near else "See timm.list_models()."
        raise ConfigError(f"model.name: timm {library.__version__} has no network {name!r}. {hint}")
    options: dict[str, Any] = {"img_size": image_size} if image_size else {}
    with same_for_every_seed():
        try:
            body: nn.Module = library.create_model(name, num_classes=0, **options)
        except TypeError:
            if not options:
                raise
            body = library.create_model(name, num_classes=0)  # it takes images of any size
    if weights == RANDOM_WEIGHTS:
        return body
    config: Any = body.pretrained_cfg
    arrays = load_weights_file(weights or _cached(config.get("hf_hub_id"), name))
    convert = getattr(sys.modules[type(body).__module__], "checkpoint_filter_fn", None)
    if convert is not None:
        arrays = convert(arrays, body)
    head = config.get("classifier") or "head"
    heads = tuple(f"{one}." for one in ([head] if isinstance(head, str) else head))
    copy_into(body, arrays, heads, f"timm's {name}", weights)
    return body


def _cached(repository: str | None, name: str) -> str:
    """Return the file with a network's weights in the local cache of the Hugging Face Hub."""
    from huggingface_hub import try_to_load_from_cache

    if not repository:
        raise ConfigError(
            f"model.weights = '': timm has no pretrained weights for {name!r}. Set model.weights "
            "to a weights file, or to random."
        )
    cached = try_to_load_from_cache(repository, "model.safetensors")
    if not isinstance(cached, str):
        raise ConfigError(
            f"The weights of {name!r} are not on this machine, and runs do not download "
            f"weights. Download them on every machine that trains or tests: hf download "
            f"{repository} model.safetensors. Or set model.weights to a file with these weights, "
            "or to random."
        )
    return cached


# --- transformers ---------------------------------------------------------------------------------


class HFClassifier(BodyClassifier):
    """Image or text classifier from transformers; its last linear layer is the ``head``.

    With an adapter, the layers between the pretrained part and the head are also trained.
    """

    def __init__(self, body: nn.Module, num_classes: int, config: Any) -> None:
        self._prefix = f"{body.base_model_prefix}."
        super().__init__(body, _without_head(body, self._prefix, config.num_labels), num_classes)
        self.pad = getattr(config, "pad_token_id", None) or 0
        size = getattr(config, "image_size", None)
        self.size = (size, size) if isinstance(size, int) else tuple(size) if size else None

    def new_parameters(self) -> Iterator[nn.Parameter]:
        """Yield the parameters outside the pretrained part."""
        for name, parameter in self.body.named_parameters():
            if not name.startswith(self._prefix):
                yield parameter

    def features(self, x: Tensor) -> Tensor:
        """Map images [N, C, H, W], or token ids [N, L] padded with zeros, to features [N, D]."""
        if x.is_floating_point():
            pixels = resized(as_rgb(x, "A network from transformers"), self.size)
            kind = next(self.body.parameters()).dtype
            return self.to_head(self.body(pixel_values=pixels.to(kind)).logits)
        output: Any = self.body(**_inputs(x, self.pad))
        return self.to_head(output.logits)


class HFCausal(BodyClassifier):
    """A causal language model from transformers, for the task next-token.

    Its output is the network's own logits, [N, L, vocabulary], for the ids of the data: without
    logits of ids that the data do not have, and with those of id 0 and of the padding token
    swapped, as in the data (`fairflower.arrays.swap_padding`). The network has no layer named
    ``head``: its last layer often shares its weights with the embeddings of tokens. With an
    adapter, this layer is frozen, too.
    """

    def __init__(self, body: Any, vocabulary: int) -> None:
        Classifier.__init__(self)
        self.body: Any = body
        self.frozen = False
        self.pad: int = body.config.pad_token_id
        self.vocabulary = vocabulary

    def forward(self, x: Tensor) -> Tensor:
        """Map token ids, int64 [N, L], to logits, [N, L, vocabulary]."""
        logits: Tensor = self.body(**_inputs(x, self.pad), use_cache=False).logits
        pad, most = self.pad, self.vocabulary
        if pad:
            # By parts, because a GPU adds the gradients of an index in random order.
            ends = [(pad, pad + 1), (1, min(pad, most))]
            ends += [(0, 1), (pad + 1, most)] if pad < most else []
            logits = torch.cat([logits[..., first:end] for first, end in ends], -1)
        return logits[..., :most].to(torch.float32)

    def features(self, x: Tensor) -> Tensor:
        """Map token ids, int64 [N, L], to the inputs of the last layer, [N, L, width]."""
        output: Any = self.body.base_model(**_inputs(x, self.pad), use_cache=False)
        return output.last_hidden_state.to(torch.float32)

    def represent(self, x: Tensor) -> Tensor:
        """Map token ids to the mean of the features of places with a token, [N, width]."""
        return mean_of_places(self.features(x), x)


def _inputs(x: Tensor, pad: int) -> dict[str, Tensor]:
    """Return a network's token ids and attention mask, given ids that zeros pad."""
    first = torch.arange(x.shape[1], device=x.device) == 0
    mask = ((x != 0) | first).long()  # a text without a token would attend to nothing
    return {"input_ids": swap_padding(x, pad), "attention_mask": mask}


def hf(
    name: str,
    num_classes: int,
    shape: tuple[int, ...],
    weights: str = "",
    output: tuple[int, ...] = (),
    *,
    dtype: Dtype = "float32",
) -> HFClassifier | HFCausal:
    """Build the network for ``model.name = "hf:NAME-or-folder"``, of an image or text.

    It is a classifier or, if its ``output`` for a text is logits at each place, (L, vocabulary), a
    causal language model.

    ``name`` is a folder written by ``save_pretrained``, or a name on the Hugging Face Hub, which is
    looked up in the local cache; nothing is downloaded. ``weights`` are empty for the pretrained
    weights, or ``random`` for random weights of the network that ``config.json`` describes.
    ``dtype`` is that of the pretrained weights; bfloat16 is sent as float32.

    Raises ``ConfigError`` if the configuration or the weights are not available, or the network
    does not support the examples, and ``NotInstalled`` if transformers or PEFT is not installed.
    """
    require("hf", f"model.name = 'hf:{name}'")
    import transformers as library

    if weights not in ("", RANDOM_WEIGHTS):
        raise ConfigError(
            f"model.weights = {weights!r}: the weights of 'hf:{name}' are always read from its "
            "folder. Leave model.weights empty, or set it to random."
        )
    texts, causal = len(shape) == 2, len(output) == 2
    kinds = library.AutoModelForImageClassification, library.AutoModelForSequenceClassification
    auto: Any = library.AutoModelForCausalLM if causal else kinds[texts]
    place = str(Path(name).expanduser()) if is_folder(name) else name
    with _explained(name), _quiet(library.utils.logging), same_for_every_seed():
        local = {"local_files_only": True, "trust_remote_code": False}
        labels = {} if causal else {"num_labels": num_classes}
        config: Any = library.AutoConfig.from_pretrained(place, **labels, **local)
        _check_fit(name, config, auto, shape)
        kind = getattr(torch, dtype)
        if weights == RANDOM_WEIGHTS:
            body: Any = auto.from_config(config, dtype=kind, trust_remote_code=False)
        else:
            options = {**local, "ignore_mismatched_sizes": True, "dtype": kind}
            body, info = auto.from_pretrained(
                place, config=config, output_loading_info=True, **options
            )
            _check_complete(name, "" if causal else body.base_model_prefix, info["missing_keys"])
        if texts:
            _check_length(name, body, config, shape[1])
    body.train()
    return HFCausal(body, num_classes) if causal else HFClassifier(body, num_classes, config)


vars(hf).update(kinds=("images", "tokens"), output_dims=(1, 2), sent_whole=True, adaptable=True)


def is_folder(name: str) -> bool:
    """Return whether a network's name is a folder on this machine."""
    return Path(name).expanduser().is_dir()


def _without_head(body: nn.Module, prefix: str, labels: int) -> int:
    linear = ((name, m) for name, m in body.named_modules() if isinstance(m, nn.Linear))
    heads = [(n, m) for n, m in linear if m.out_features == labels and not n.startswith(prefix)]
    if not heads:
        raise ConfigError(
            f"model.name: {type(body).__name__} from transformers does not end in a linear layer. "
            "Choose another network."
        )
    name, head = heads[-1]
    above, _, last = name.rpartition(".")
    setattr(body.get_submodule(above), last, nn.Identity())
    return head.in_features


def _check_fit(name: str, config: Any, auto: Any, shape: tuple[int, ...]) -> None:
    if type(config) not in auto._model_mapping:
        kind = "classifier for texts" if len(shape) == 2 else "classifier for images"
        kind = "causal language model" if "CausalLM" in auto.__name__ else kind
        raise ConfigError(
            f"model.name = 'hf:{name}': transformers has no {config.model_type} {kind}. Choose "
            "another network or other data."
        )
    if len(shape) == 2:
        pad = getattr(config, "pad_token_id", None)
        if not (isinstance(pad, int) and pad >= 0):
            raise ConfigError(
                f"model.name = 'hf:{name}': found pad_token_id = {pad} in its config.json, so "
                "token 0 of a text would count as padding. Copy the network to a folder, and set "
                "pad_token_id there to the id of its tokenizer's padding token, or to 0 if it has "
                "another tokenizer."
            )
        if shape[0] > config.vocab_size:
            raise ConfigError(
                f"model.name = 'hf:{name}': its vocabulary has {config.vocab_size} token ids, but "
                f"the data have {shape[0]}. Use the network's tokenizer (texts:tokenizer={name})."
            )


def _check_length(name: str, body: nn.Module, config: Any, length: int) -> None:
    most = getattr(config, "max_position_embeddings", None) or length
    for key, layer in body.named_modules():
        # RoBERTa and its relatives count positions from padding_idx + 1.
        if key.endswith("position_embeddings") and getattr(layer, "padding_idx", None) is not None:
            most -= layer.padding_idx + 1
    if length > most:
        raise ConfigError(
            f"model.name = 'hf:{name}': it accepts at most {most} tokens, but the texts have "
            f"{length}. Shorten the texts (texts:length={most})."
        )


def _check_complete(name: str, prefix: str, missing: Iterable[str]) -> None:
    """Raise ``ConfigError`` if weights are missing, except a pooler's; empty ``prefix``: of all."""
    start = prefix and f"{prefix}."
    if lost := [key for key in missing if key.startswith(start) and ".pooler." not in key]:
        raise ConfigError(
            f"model.name = 'hf:{name}': its weights lack {len(lost)} arrays ({sorted(lost)[0]}, "
            "...). Its config.json and its weights belong to different networks."
        )


@contextmanager
def _explained(name: str) -> Iterator[None]:
    """Convert an error about a network's missing files to a ``ConfigError`` with a remedy."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        problem = (
            "this is neither a folder nor a network in the local cache of the Hugging Face Hub, "
            "and runs do not download networks. Download it on every machine that trains or tests: "
            f"hf download {name}. Or download its config.json, model.safetensors and tokenizer "
            "files to a folder, and set model.name = 'hf:FOLDER'."
        )
        if is_folder(name):
            reason = str(error).strip().partition("\n")[0]
            problem = (
                f"the folder cannot be read as a network: {reason} It needs config.json and "
                "model.safetensors, as save_pretrained writes them; without model.safetensors, "
                "set model.weights = 'random'."
            )
        raise ConfigError(f"model.name = 'hf:{name}': {problem}") from error


@contextmanager
def _quiet(log: Any) -> Iterator[None]:
    """Suppress transformers' progress bars and its warnings about a new head."""
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()


# --- segmentation-models-pytorch ------------------------------------------------------------------


class SMPSegmenter(Segmenter):
    """A network of segmentation-models-pytorch, ``body``."""

    def __init__(self, body: nn.Module, stride: int) -> None:
        super().__init__()
        self.body, self.stride = body, stride

    def maps(self, x: Tensor) -> Tensor:
        return self.body(x)


def smp(
    name: str,
    num_classes: int,
    shape: tuple[int, int, int],
    weights: str = "",
    *,
    encoder: str = "resnet18",
) -> SMPSegmenter:
    """Build the network for ``model.name = "smp:NAME"``, such as ``smp:Unet:encoder=resnet18``.

    NAME is one of the library's architectures, for example Unet, UnetPlusPlus, FPN or DeepLabV3Plus
    and ``encoder`` one of its encoders. ``weights`` are empty or ``random`` for random weights, or
    a .safetensors or .pth file: the state dict of the encoder, or of the whole network, whose
    ``segmentation_head`` is ignored.

    Raises ``ConfigError`` if the library does not have this network or the weights belong to
    another one, and ``NotInstalled`` if segmentation-models-pytorch is not installed.
    """
    require("smp", f"The network {name!r} from segmentation-models-pytorch")
    import segmentation_models_pytorch as library

    sizes = {"in_channels": shape[0], "classes": num_classes}
    try:
        body: Any = library.create_model(name, encoder, encoder_weights=None, **sizes)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"model.name = 'smp:{name}:encoder={encoder}': {error.args[0]}"
        ) from error
    if weights not in ("", RANDOM_WEIGHTS):
        arrays = load_weights_file(weights)
        if any(key.startswith("encoder.") for key in arrays):
            head = "segmentation_head."
            arrays |= {k: v for k, v in body.state_dict().items() if k.startswith(head)}
            copy_into(body, arrays, (), f"smp's {name}", weights)
        else:
            copy_into(body.encoder, arrays, ("fc.", "classifier."), f"smp's {encoder}", weights)
    return SMPSegmenter(body, int(body.encoder.output_stride))


vars(smp).update(output_dims=(3,), sent_whole=True)
