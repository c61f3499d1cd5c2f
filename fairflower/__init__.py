"""Fair federated learning on Flower: one global model that works for every client."""

from importlib import metadata

try:
    __version__ = metadata.version("fairflower")
except metadata.PackageNotFoundError:  # run from a Flower app bundle, not installed
    __version__ = "unknown"
