"""What can be named in a run config besides strategies.

Kept apart from the code that it names, so that a run config can be checked
(and ``fairflower list`` can answer) without importing torch.
"""

#: name -> (module, attribute, one line)
CLIENTS: dict[str, tuple[str, str, str]] = {
    "sgd": (
        "fairflower.clients.sgd",
        "SGD",
        "SGD with momentum and weight decay, a new optimiser every round "
        "(McMahan et al. 2017; settings of FedHEAL §4.1)",
    ),
}

MODELS: dict[str, tuple[str, str, str]] = {
    "cnn": (
        "fairflower.models.cnn",
        "cnn",
        "three convolutions with group norm, 26 k to 34 k parameters",
    ),
    "resnet10": ("fairflower.models.resnet", "resnet10", "the papers' ResNet-10, 4.9 M parameters"),
    "resnet12": ("fairflower.models.resnet", "resnet12", "the papers' ResNet-12, 5.0 M parameters"),
    "resnet18": (
        "fairflower.models.resnet",
        "resnet18",
        "torchvision's ResNet-18, 11.2 M parameters",
    ),
}

DATA_SETS: dict[str, tuple[str, str, str]] = {
    "uci-digits": (
        "fairflower.data.uci_digits",
        "UCIDigits",
        "embedded: UCI handwritten digits in four domains (plain, inverted on texture, "
        "rotated and noisy, printed fonts)",
    ),
    "digits": (
        "fairflower.data.digits",
        "Digits",
        "MNIST, USPS, SVHN and SYN, the Digits benchmark of FedHEAL and FedEquilibria",
    ),
    "office-caltech": (
        "fairflower.data.office_caltech",
        "OfficeCaltech",
        "Office-Caltech-10 from a folder: ten kinds of objects in amazon, caltech, dslr and "
        "webcam images (FedHEAL, FedEquilibria)",
    ),
    "pacs": (
        "fairflower.data.pacs",
        "PACS",
        "seven kinds of objects in photos, art paintings, cartoons and sketches (FedEquilibria)",
    ),
    "npz": (
        "fairflower.data.folder",
        "NpzFolder",
        "your own: a folder with one <domain>.npz per domain (x_train, y_train, x_test, y_test)",
    ),
}
