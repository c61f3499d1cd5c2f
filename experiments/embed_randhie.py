"""Generate ``fairflower/published/randhie.json`` from the study's table in statsmodels.

    python experiments/embed_randhie.py <statsmodels>/datasets/randhie/src/randhie.csv

Each column becomes its decimal numbers, rounded as in `ROUNDED` and joined by commas. The columns
are joined by semicolons, compressed with zlib and encoded in base 85, because a Flower app bundle
contains only text.
"""

from __future__ import annotations

import argparse
import base64
import json
import zlib
from pathlib import Path

import pandas as pd

#: Column of the study -> number of decimals.
ROUNDED = {
    "logc": 3,
    "idp": 0,
    "lpi": 2,
    "fmde": 2,
    "physlm": 3,
    "disea": 2,
    "linc": 2,
    "num": 0,
    "educdec": 1,
    "xage": 1,
    "female": 0,
    "child": 0,
}
OUTPUT = Path(__file__).parents[1] / "fairflower" / "published" / "randhie.json"


def packed(source: Path) -> str:
    """Return JSON with the names and the compressed values of the columns in use."""
    table = pd.read_csv(source)
    columns = {
        "person": table.zper.ne(table.zper.shift()).cumsum() - 1,
        "site": table.site,
        "health": table.hlthg + 2 * table.hlthf + 3 * table.hlthp,
        "mdvis": table.mdvis,
        **{name: table[name].round(decimals) for name, decimals in ROUNDED.items()},
    }
    columns["educdec"] = columns["educdec"].fillna(12)  # four rows lack a value: use the median
    text = ";".join(",".join(f"{value:g}" for value in column) for column in columns.values())
    deflated = base64.b85encode(zlib.compress(text.encode(), 9)).decode()
    return json.dumps({"columns": list(columns), "values": deflated}) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path)
    OUTPUT.write_text(packed(parser.parse_args().source), encoding="utf-8")
