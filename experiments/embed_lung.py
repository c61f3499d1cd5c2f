"""Generate ``fairflower/published/lung.json`` from the table ``lung.csv`` of lifelines.

    python experiments/embed_lung.py <lifelines>/datasets/lung.csv

All columns are embedded. A value that is missing is ``nan``, and the one patient whose institution
is unknown has institution 0. ``male`` is 1 for men.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pandas as pd

OUTPUT = Path(__file__).parents[1] / "fairflower" / "published" / "lung.json"
#: Column of the embedded table -> column of the source.
COLUMNS = {
    **{"institution": "inst", "time": "time", "died": "status", "age": "age", "male": "sex"},
    **{"ecog": "ph.ecog", "karnofsky": "ph.karno", "own karnofsky": "pat.karno"},
    **{"calories": "meal.cal", "loss": "wt.loss"},
}


def packed(source: Path) -> str:
    """Return JSON with each column as numbers joined by commas."""
    table = pd.read_csv(source)
    table["inst"] = table["inst"].fillna(0)
    table["sex"] = table["sex"].eq(1).astype(int)
    texts = {name: ",".join(f"{v:g}" for v in table[of]) for name, of in COLUMNS.items()}
    return json.dumps(texts, indent=0) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path)
    OUTPUT.write_text(packed(parser.parse_args().source), encoding="utf-8")
