"""The contact sheet and the table of clients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from rich.console import Console

from fairflower.config import DataConfig
from fairflower.data import Federation, prepare
from fairflower.data.show import clients_table, contact_sheet


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    """Domains of one color each: 8 red and 4 gray images, two clients each."""
    red = np.zeros((8, 6, 6, 3), np.uint8)
    red[..., 0] = 255
    grey = np.full((4, 6, 6), 128, np.uint8)
    for name, x in (("red", red), ("$[grey]_", grey)):
        y = np.arange(len(x)) % 4
        np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y, x_test=x[:3], y_test=y[:3])
    return prepare(DataConfig(name="npz", dir=str(tmp_path), clients_per_domain=2))


def test_contact_sheet_shows_each_domains_images(federation: Federation, tmp_path: Path) -> None:
    path = contact_sheet(federation, tmp_path / "new" / "sheet.png")
    pixels = imread(path)[..., :3]
    half = len(pixels) // 2
    for part, colour, images in ((pixels[:half], 128 / 255, 4), (pixels[half:], (1, 0, 0), 8)):
        covered = np.isclose(part, colour, atol=0.01).all(-1).mean()
        # An image is 0.7 of the 1.15 inches of a row and of the 9.2 inches of the width.
        assert covered == pytest.approx(images * 0.7 * 0.7 / (1.2 * 9.25), rel=0.1)


def test_table_counts_clients_domains_and_tests(federation: Federation, tmp_path: Path) -> None:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(clients_table(federation))
    lines = [line.replace("│", " ").split() for line in captured.get().splitlines()]
    assert ["all", "$[grey]_", "4", "1", "1", "1", "1", "3"] in lines
    assert ["all", "red", "8", "2", "2", "2", "2", "3"] in lines
    for client in federation.clients:
        numbers = (client.num_examples, *client.class_counts)
        assert [str(client.client_id), client.domain, *map(str, numbers)] in lines
    assert f"red:{tmp_path / 'red.npz'}" in "".join(captured.get().split())


@pytest.mark.parametrize(("classes", "count"), [(10, 123), (62, 12345)])
def test_no_number_is_cropped_on_a_narrow_terminal(
    federation: Federation, classes: int, count: int
) -> None:
    counts = tuple(range(count, count + classes))
    clients = tuple(replace(client, class_counts=counts) for client in federation.clients)
    console = Console(width=80)
    with console.capture() as captured:
        console.print(clients_table(replace(federation, clients=clients, num_classes=classes)))
    shown = captured.get().split()
    assert all(shown.count(str(number)) == len(clients) for number in counts)
