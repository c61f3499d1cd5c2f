"""Tables as hospitals write them."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def patients(n: int, seed: int, decimal: str = ".", missing: float = 0.1) -> list[list[str]]:
    """Return rows of patients with two visits each: id, age, BMI, sex, smoking and disease."""
    rng = np.random.default_rng(seed)
    rows = []
    for k in range(n):
        age, bmi, male = rng.normal(60, 10), rng.normal(27, 4), rng.random() < 0.5
        smoking = str(rng.choice(["never", "former", "current"], p=[0.5, 0.3, 0.2]))
        score = 0.06 * (age - 60) + 0.1 * (bmi - 27) + 0.5 * male + (smoking == "current")
        ill = rng.random() < 1 / (1 + np.exp(0.3 - score))
        weight = "" if rng.random() < missing else f"{bmi:.1f}".replace(".", decimal)
        numbers = f"{age:.1f}".replace(".", decimal), weight
        rows.append([f"P{k // 2}", *numbers, "FM"[male], smoking, ("no", "yes")[int(ill)]])
    return rows


#: What the columns mean, with ranges and levels for masked sums.
SCHEMA = """
[columns.age]
kind = "number"
low = 0
high = 110
[columns.bmi]
kind = "number"
low = 10
high = 50
[columns.sex]
kind = "category"
levels = ["F", "M"]
[columns.smoking]
kind = "category"
levels = ["never", "former", "current"]
"""

HEADER = ["patient", "age", "bmi", "sex", "smoking", "disease"]


def write_three(folder: Path) -> Path:
    """Write three hospitals: semicolons, decimal commas and a BOM; an extra column; small."""
    folder.mkdir()
    order = [5, 3, 0, 1, 2, 4]
    south = [[row[k] for k in order] + [f"W{n % 3}"] for n, row in enumerate(patients(100, 1))]
    tables = {
        "north": (";", [HEADER, *patients(200, 0, ",")], "utf-8-sig"),
        "south": (",", [[*(HEADER[k] for k in order), "ward"], *south], "utf-8"),
        "west": ("\t", [HEADER, *patients(40, 2)], "utf-8"),
    }
    for name, (mark, rows, encoding) in tables.items():
        text = "\n".join(mark.join(row) for row in rows)
        (folder / f"{name}.csv").write_text(text + "\n", encoding=encoding)
    return folder
