"""Names of the built-in strategies, clients, models and data sets.

Modules are imported on first use, so that ``fairflower --help`` does not import torch.
"""

from fairflower.registry.named import Registry

STRATEGIES = Registry(
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
        "fedomg": "fedomg:FedOMG",
        "fedawa": "fedawa:FedAWA",
        "fedaware": "fedaware:FedAWARE",
        "median": "median:Median",
        "trimmed-mean": "median:TrimmedMean",
        "geometric-median": "median:GeometricMedian",
        "krum": "krum:Krum",
        "multi-krum": "krum:MultiKrum",
        "bulyan": "krum:Bulyan",
        "alone": "references:Alone",
        "pooled": "references:Pooled",
    },
    kind="strategy",
    base="fairflower.strategies:FairStrategy",
    server_only=True,
)

CLIENTS = Registry(
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
        "fpl": "fpl:FPL",
        "fedplvm": "fedplvm:FedPLVM",
        "fedrdn": "fedrdn:FedRDN",
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

#: User-defined metrics, named ``module:function``; see `fairflower.registry.user_metrics`.
METRICS = Registry("fairflower.metrics", {}, kind="metric")

#: Measurements of other packages; see `fairflower.registry.measurements`.
OWN_MEASUREMENTS = Registry("fairflower.measurements", {}, kind="measurement")

#: Name of the task of data that say nothing else.
CLASSIFICATION = "classification"

#: What networks learn; see `fairflower.tasks`.
TASKS = Registry(
    "fairflower.tasks",
    {
        "classification": "classification:Classification",
        "multilabel": "multilabel:MultiLabel",
        "regression": "regression:Regression",
        "survival": "survival:Survival",
        "segmentation": "segmentation:Segmentation",
        "next-token": "next_token:NextToken",
    },
    kind="task",
    base="fairflower.tasks:Task",
)

#: Number of dimensions of an example's shape -> kind of examples. The shapes are (features,),
#: (vocabulary, length) for token ids, and (channels, height, width).
KINDS = {1: "features", 2: "tokens", 3: "images"}

#: Default model for each kind of examples; all other built-in models are for images.
MODEL_OF = {"images": "cnn", "features": "mlp", "tokens": "embedding-bag"}

#: Strategies that are no candidates but what the others are compared with.
REFERENCES = ("alone", "pooled")

#: Names of plain local training; a method's label omits them.
PLAIN_CLIENTS = ("sgd", "fedavg")

MODELS = Registry(
    "fairflower.models",
    {
        "cnn": "small:CNN - three convolutional layers with group norm or BatchNorm "
        "(cnn:norm=batch), 26 k to 34 k parameters",
        "mlp": "small:MLP - two hidden layers of 64 units (mlp:hidden=64), for features and for "
        "images of any size",
        "embedding-bag": "small:EmbeddingBag - a linear classifier on the mean of 64-dimensional "
        "token embeddings (embedding-bag:width=64), for token ids",
        "gpt": "small:GPT - a causal transformer with two layers of 64 dimensions "
        "(gpt:width=64:layers=2:heads=4), for next-token; 137 k parameters on bytes",
        "resnet10": "resnet:resnet10 - the papers' ResNet-10, 4.9 M parameters",
        "resnet12": "resnet:resnet12 - the papers' ResNet-12, 5.0 M parameters",
        "resnet18": "resnet:resnet18 - torchvision's ResNet-18, 11.2 M parameters (FedISM); "
        "pretrained with model.weights = imagenet or a file",
        "unet": "unet:UNet - a small U-Net for segmentation with group norm or BatchNorm "
        "(unet:norm=batch), 0.12 M parameters (unet:width=16)",
        "prompt-vit-tiny": "prompt_vit:prompt_vit_tiny - FedGCR's prompts for a frozen ViT that is "
        "small enough for a CPU: 0.76 M parameters, pretrained on printed characters; 0.13 M "
        "parameters are trained",
        "prompt-vit-b-16": "prompt_vit:prompt_vit_b_16 - FedGCR's prompts for a frozen ViT-B/16: "
        "85.8 M parameters, pretrained on ImageNet; 4.7 M parameters are trained",
        "vpt-vit-tiny": "prompt_vit:vpt_vit_tiny - visual prompt tuning (Jia et al. 2022): "
        "prompt-vit-tiny without GC-Net, the baseline in FedGCR's ablation; 1.8 k parameters are "
        "trained",
        "vpt-vit-b-16": "prompt_vit:vpt_vit_b_16 - visual prompt tuning: prompt-vit-b-16 without "
        "GC-Net; 10.8 k parameters are trained",
        "timm:NAME": "libraries:timm - any image classifier from timm, trained as a whole or "
        "with an adapter",
        "hf:NAME": "libraries:hf - an image or text classifier or, for next-token, a causal "
        "language model from transformers, in a folder or on the Hugging Face Hub, trained as a "
        "whole or with an adapter",
        "smp:NAME": "libraries:smp - a segmentation network from segmentation-models-pytorch "
        "(smp:Unet:encoder=resnet18)",
        "prompt-timm:NAME": "libraries:prompt_timm - FedGCR's prompts for a frozen ViT from timm",
        "vpt-timm:NAME": "libraries:vpt_timm - visual prompt tuning of a frozen ViT from timm: "
        "prompt-timm without GC-Net",
    },
    kind="model",
    base="torch.nn:Module",
    makers=True,
)

#: Adapters for a frozen network. Adapters of other packages are functions that modify a network.
ADAPTERS = Registry(
    "fairflower.models",
    {
        "lora": "pretrained:lora - low-rank adapters parallel to linear layers (lora:r=8; Hu et "
        "al. 2022), implemented by PEFT",
    },
    kind="adapter",
    base="builtins:object",
    makers=True,
    group="fairflower.adapters",  # the package's name is the group of models
)

#: Policies that select the clients of a round.
PARTICIPATION = Registry(
    "fairflower.participation",
    {
        "uniform": "fairflower.aggregation.participation:Uniform - uniform at random",
        "by-examples": "policies:ByExamples - at random, in proportion to training examples, which "
        "fedavg then counts twice",
        "round-robin": "policies:RoundRobin - in turn",
        "power-of-choice": "policies:PowerOfChoice - the clients with the largest losses among d "
        "random candidates (power-of-choice:d=10; Cho, Wang & Joshi 2022)",
    },
    kind="participation policy",
    base="fairflower.aggregation.participation:Participation",
    server_only=True,
)

#: Experiment trackers. A built-in name is also the name of a library and of the extra with it.
TRACKERS = Registry(
    "fairflower.trackers",
    {
        "tensorboard": "tensorboard:TensorBoard - TensorBoard, in the run folder",
        "mlflow": "mlflow:MLflow - MLflow, on a server or in a file",
        "wandb": "wandb:WandB - Weights & Biases",
    },
    kind="tracker",
    base="fairflower.trackers:Tracker",
    server_only=True,
)

#: Value of ``model.weights`` for a library's network with random instead of pretrained weights.
RANDOM_WEIGHTS = "random"

#: Data sets that read a user's own files.
OWN_FILES = ("images", "masks", "npz", "texts", "corpus", "table")

DATA_SETS = Registry(
    "fairflower.published",
    {
        "uci-digits": "uci_digits:UCIDigits - embedded: UCI handwritten digits in four domains "
        "(plain, inverted on texture, rotated and noisy, printed fonts)",
        "digits": "image_sets:Digits - MNIST, USPS, SVHN and SYN, the Digits benchmark of FedHEAL "
        "and FedEquilibria",
        "office-caltech": "image_sets:OfficeCaltech - Office-Caltech-10 from a folder: ten "
        "classes of objects in images from amazon, caltech, dslr and webcam (FedHEAL, "
        "FedEquilibria)",
        "pacs": "image_sets:PACS - seven classes of objects in photos, art paintings, cartoons "
        "and sketches (FedEquilibria)",
        "digit-five": "image_sets:DigitFive - MNIST, USPS, SYN, MNIST-M and SVHN, as in FedGCR",
        "domainnet": "image_sets:DomainNet - DomainNet from a folder: ten classes of objects in "
        "six image styles (FedGCR)",
        "ham10000": "image_sets:HAM10000 - HAM10000: seven classes of skin lesions in one domain, "
        "for federations of clean and corrupted clients",
        "isic2019": "image_sets:ISIC2019 - ISIC 2019 from a folder: eight classes of skin lesions "
        "in one domain (FedISM)",
        "rsna-ich": "image_sets:RSNAICH - RSNA intracranial hemorrhage from a folder: five types "
        "of hemorrhage in one domain (FedISM)",
        "cifar10": "image_sets:CIFAR10 - CIFAR-10 in one domain, divided among clients equally or "
        "by a Dirichlet partition",
        "femnist": "image_sets:FEMNIST - FEMNIST in one domain; each client is a writer",
        "randhie": "tables:RandHIE - embedded, features: doctor visits in the RAND Health "
        "Insurance Experiment, in four domains by self-rated health (excellent, good, fair, poor)",
        "heart-disease": "tables:HeartDisease - embedded, features: heart disease in 740 patients "
        "at four hospitals (Cleveland, Hungary, Switzerland, Long Beach)",
        "lung": "tables:Lung - embedded, features: survival of 228 patients with lung cancer at "
        "18 institutions, of which 11 are joined",
        "strokes": "strokes:Strokes - embedded, segmentation: strokes of handwritten digits on "
        "the paper of four scanners (flatbed, fax, microfilm, phone)",
        "languages": "fairflower.data.texts:Languages - embedded, next-token: the same 659 "
        "interface texts in six languages of five scripts, as bytes",
        "images": "fairflower.data.own_images:DomainImageFolder - your own images: a folder with "
        "<domain>/<class>/<image>, or manifest.csv; images:bits=12 for 16-bit gray images that "
        "store 12-bit values",
        "masks": "fairflower.data.own_images:MaskFolder - your own images with masks, for "
        "segmentation: a folder with <site>/images/<image> and <site>/masks/<mask>, or "
        "manifest.csv",
        "npz": "fairflower.data.folders:DomainNpzFolder - your own arrays: a folder with "
        "<domain>.npz for each domain (x_train, y_train, x_test, y_test)",
        "texts": "fairflower.data.texts:DomainTextFolder - your own texts: a folder with "
        "<domain>.csv for each domain (text, label); texts:length=64:tokenizer=FOLDER for a "
        "network from transformers",
        "table": "fairflower.tables.data_set:TableFolder - your own tables: a folder with "
        "<domain>.csv, .tsv, .txt or .parquet for each domain, or one file with "
        "data.domain-column; data.target names what is predicted",
        "corpus": "fairflower.data.texts:DomainCorpus - your own texts, for next-token: a folder "
        "with <domain>/*.txt or *.jsonl; corpus:length=64:tokenizer=FOLDER for a network from "
        "transformers",
    },
    kind="data set",
    base="fairflower.data:DataSet",
    group="fairflower.data",
)
