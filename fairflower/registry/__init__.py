"""Names of the built-in strategies, clients, models and data sets.

Their modules are imported on first use, so that ``fairflower --help`` does not import torch.
"""

from __future__ import annotations

from fairflower.registry.named import (
    DescribedRegistry,
    FamilyRegistry,
    FunctionRegistry,
    MethodRegistry,
)

STRATEGIES = MethodRegistry(
    "fairflower.strategies",
    {
        "fedavg": "fedavg:FedAvg",
        "uniform": "fedavg:Uniform",
        "fedheal": "fedheal:FedHEAL",
        "fedequilibria": "fedequilibria:FedEquilibria",
        "fedmgda+": "fedmgda:FedMGDAPlus",
        "fedfv": "fedfv:FedFV",
        "fedgcr": "fedgcr:FedGCR",
        "fedism": "fedism:FedISM",
        "fedism+": "fedismplus:FedISMPlus",
        "afl": "afl:AFL",
        "qffl": "qffl:QFFL",
        "fairfed": "fairfed:FairFed",
        "fedce": "fedce:FedCE",
        "fedga": "fedga:FedGA",
        "term": "term:TERM",
        "pa3fed": "pa3fed:PA3Fed",
        "superquantile": "superquantile:Superquantile",
        "propfair": "propfair:PropFair",
        "fednova": "fednova:FedNova",
        "aaggff": "aaggff:AAggFF",
        "fedeba+": "fedeba:FedEBAPlus",
        "adafed": "adafed:AdaFed",
        "fedmdfg": "fedmdfg:FedMDFG",
        "fedlf": "fedlf:FedLF",
        "eagle": "eagle:EAGLE",
        "fedpw": "fedpw:FedPW",
        "fairrfl": "fairrfl:FairRFL",
        "dq-ffl": "dqffl:DqFFL",
        "daa": "daa:DaA",
    },
    kind="strategy",
    base="fairflower.strategies:FairStrategy",
)

CLIENTS = MethodRegistry(
    "fairflower.clients",
    {
        "sgd": "sgd:SGD",
        "fedavg": "sgd:SGD",
        "sam": "sam:SAM",
        "fedsam": "sam:FedSAM",
        "gsam": "sam:GSAM",
        "harmofl": "harmofl:HarmoFL",
        "fedprox": "fedprox:FedProx",
        "scaffold": "scaffold:SCAFFOLD",
        "moon": "moon:MOON",
        "feddyn": "feddyn:FedDyn",
        "fedproc": "fedproc:FedProc",
        "fedproto": "fedproto:FedProto",
        "fedlsa": "fedlsa:FedLSA",
        "fedgc": "fedgc:FedGC",
        "fedmix": "fedmix:FedMix",
        "ditto": "ditto:Ditto",
        "fedbn": "fedbn:FedBN",
        "silobn": "silobn:SiloBN",
        "fedper": "fedper:FedPer",
        "fedrep": "fedrep:FedRep",
        "lg-fedavg": "lgfedavg:LGFedAvg",
        "propfair": "propfair:PropFair",
    },
    kind="client",
    base="fairflower.clients:Trainer",
)

#: Metrics of users, by ``module:function``; see `fairflower.registry.user_metrics`.
METRICS = FunctionRegistry("fairflower.metrics", "metric")

#: Measurements that a strategy can request, computed by `fairflower.training.measurements`.
MEASUREMENTS = (
    *("received_loss", "received_accuracy", "received_balanced_accuracy", "sharpness"),
    *("minus_accuracy", "minus_balanced_accuracy", "gradient", "steps", "trained_loss"),
    *("fisher", "representation", "received_representation", "local_loss", "perturbed_loss"),
    "class_counts",
    "received_group_counts",
)

#: Length of an example's shape -> kind: (features,), (vocabulary, length) of token ids, or
#: (channels, height, width).
KINDS = {1: "features", 2: "tokens", 3: "images"}

#: Default model by kind of examples; all other built-in models are for images.
MODEL_OF = {"images": "cnn", "features": "mlp", "tokens": "embedding-bag"}

#: Names of plain local training, which a method's label omits.
PLAIN_CLIENTS = ("sgd", "fedavg")

MODELS = FamilyRegistry(
    "fairflower.models",
    {
        "cnn": (
            "cnn:CNN",
            "three convolutions with group norm, or BatchNorm (cnn:norm=batch), 26 k to 34 k "
            "parameters",
        ),
        "mlp": (
            "perceptron:MLP",
            "two hidden layers of 64 (mlp:hidden=64), for features; also for images, of any size",
        ),
        "embedding-bag": (
            "embedding_bag:EmbeddingBag",
            "the mean of 64 learned numbers per token (embedding-bag:width=64), for token ids",
        ),
        "resnet10": ("resnet:resnet10", "the papers' ResNet-10, 4.9 M parameters"),
        "resnet12": ("resnet:resnet12", "the papers' ResNet-12, 5.0 M parameters"),
        "resnet18": (
            "resnet:resnet18",
            "torchvision's ResNet-18, 11.2 M parameters (FedISM); model.weights = imagenet, or a "
            "file, for pretrained ones",
        ),
        "prompt-vit-tiny": (
            "prompt_vits:prompt_vit_tiny",
            "FedGCR's prompts for a frozen ViT, small enough for a CPU: 0.76 M parameters "
            "pretrained on printed characters; 0.13 M are trained",
        ),
        "prompt-vit-b-16": (
            "prompt_vits:prompt_vit_b_16",
            "FedGCR's prompts for a frozen ViT-B/16: 85.8 M parameters pretrained on ImageNet; "
            "4.7 M are trained",
        ),
        "vpt-vit-tiny": (
            "prompt_vits:vpt_vit_tiny",
            "prompt-vit-tiny without GC-Net, visual prompt tuning (Jia et al. 2022), the base of "
            "FedGCR's ablation: 1.8 k are trained",
        ),
        "vpt-vit-b-16": (
            "prompt_vits:vpt_vit_b_16",
            "prompt-vit-b-16 without GC-Net: 10.8 k are trained",
        ),
    },
    families={
        "timm": (
            "timm_networks:timm",
            "any network of timm for images, whole or with an adapter",
            ("images",),
        ),
        "hf": (
            "hf_networks:hf",
            "image or text classifier of transformers, a folder or a name at the Hugging Face Hub, "
            "whole or with an adapter",
            ("images", "tokens"),
        ),
        "prompt-timm": (
            "timm_networks:prompt_timm",
            "FedGCR's prompts for a frozen ViT of timm",
            ("images",),
        ),
        "vpt-timm": ("timm_networks:vpt_timm", "the same without GC-Net", ("images",)),
    },
    kind="model",
    base="fairflower.models:Classifier",
    makers=True,
)

#: Adapters of a frozen network; other packages' are functions that change a network.
ADAPTERS = DescribedRegistry(
    "fairflower.models",
    {"lora": ("adapters:lora", "low-rank adapters beside layers (Hu et al. 2022), by PEFT")},
    kind="adapter",
    base="builtins:object",
    makers=True,
)

#: Families of models that are trained whole or with ``model.adapter``.
ADAPTABLE = frozenset({"timm", "hf"})

#: Policies that choose the clients of a round.
PARTICIPATION = DescribedRegistry(
    "fairflower.participation",
    {
        "uniform": ("uniform:Uniform", "uniform at random"),
        "by-examples": ("by_examples:ByExamples", "in proportion to training examples"),
        "round-robin": ("round_robin:RoundRobin", "in turn"),
        "power-of-choice": (
            "power_of_choice:PowerOfChoice",
            "the largest losses among d candidates (Cho, Wang & Joshi 2022)",
        ),
    },
    kind="participation policy",
    base="fairflower.aggregation.participation:Participation",
)

#: Name of library, module and extra -> class in `fairflower.trackers`.
TRACKERS = {"tensorboard": "TensorBoard", "mlflow": "MLflow", "wandb": "WandB"}

#: Models with a setting ``model.weights``.
PRETRAINED = frozenset(
    {"prompt-vit-tiny", "prompt-vit-b-16", "vpt-vit-tiny", "vpt-vit-b-16", "resnet18"}
)

#: The ``model.weights`` of a network of a library without pretrained weights.
RANDOM_WEIGHTS = "random"

#: Models whose arrays are all communicated: only the server reads the pretrained weights.
INIT_ONLY_WEIGHTS = frozenset({"resnet18"})

DATA_SETS = DescribedRegistry(
    "fairflower.data",
    {
        "uci-digits": (
            "uci_digits:UCIDigits",
            "embedded: UCI handwritten digits in four domains (plain, inverted on texture, "
            "rotated and noisy, printed fonts)",
        ),
        "digits": (
            "digits:Digits",
            "MNIST, USPS, SVHN and SYN, the Digits benchmark of FedHEAL and FedEquilibria",
        ),
        "office-caltech": (
            "objects:OfficeCaltech",
            "Office-Caltech-10 from a folder: ten kinds of objects in amazon, caltech, dslr and "
            "webcam images (FedHEAL, FedEquilibria)",
        ),
        "pacs": (
            "objects:PACS",
            "seven kinds of objects in photos, art paintings, cartoons and sketches "
            "(FedEquilibria)",
        ),
        "digit-five": ("digits:DigitFive", "MNIST, USPS, SYN, MNIST-M and SVHN, as in FedGCR"),
        "domainnet": (
            "objects:DomainNet",
            "DomainNet from a folder: ten kinds of objects in six kinds of pictures (FedGCR)",
        ),
        "ham10000": (
            "medical:HAM10000",
            "seven kinds of skin lesions, one domain: for clean and corrupted clients",
        ),
        "isic2019": (
            "medical:ISIC2019",
            "ISIC 2019 from a folder: eight kinds of skin lesions, one domain (FedISM)",
        ),
        "rsna-ich": (
            "medical:RSNAICH",
            "RSNA intracranial haemorrhage from a folder: five kinds, one domain (FedISM)",
        ),
        "cifar10": ("hub:CIFAR10", "CIFAR-10, one domain: clients of equal or Dirichlet shares"),
        "femnist": ("hub:FEMNIST", "FEMNIST, one domain: a client is a writer"),
        "randhie": (
            "randhie:RandHIE",
            "embedded, features: visits to doctors in the RAND Health Insurance Experiment, by "
            "self-rated health (excellent, good, fair, poor)",
        ),
        "heart-disease": (
            "heart_disease:HeartDisease",
            "embedded, features: heart disease at four hospitals (Cleveland, Hungary, Switzerland, "
            "Long Beach), 740 patients",
        ),
        "images": (
            "own_folder:DomainImageFolder",
            "your own: a folder with <domain>/<class>/<image>; images:bits=12 where grey files of "
            "16 bits hold numbers of 12",
        ),
        "npz": (
            "own_folder:DomainNpzFolder",
            "your own: a folder with <domain>.npz for each domain (x_train, y_train, "
            "x_test, y_test)",
        ),
        "texts": (
            "texts:DomainTextFolder",
            "your own: a folder with one <domain>.csv per domain (text, label); "
            "texts:length=64:tokenizer=FOLDER for a network of transformers",
        ),
    },
    kind="data set",
    base="fairflower.data:DataSet",
)
