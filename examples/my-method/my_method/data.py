import numpy as np

from fairflower.data import DataSet


class Stripes(DataSet):
    """Stripes of three widths in noise, across or along."""

    num_classes = 3

    def all_domains(self):
        return ["across", "along"]

    def labels(self, domain, split):
        return np.arange(300 if split == "train" else 90) % 3

    def images(self, domain, split, rows):
        noise = np.random.default_rng(split == "test").integers(0, 64, (300, 12, 12))
        stripes = np.arange(12) // (rows[:, None, None] % 3 + 1) % 2 * 127
        images = (stripes + noise[rows]).astype(np.uint8)
        return images.swapaxes(1, 2) if domain == "along" else images

    def fingerprint(self):
        return 1  # raise it when the images change

    def source(self, domain):
        return "drawn by my_method"
