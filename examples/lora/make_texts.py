"""Write ``texts/`` from the three files of UCI's Sentiment Labelled Sentences.

    python examples/lora/make_texts.py FOLDER

FOLDER has amazon_cells_labelled.txt, imdb_labelled.txt and yelp_labelled.txt: lines of a sentence,
a tab, and 0 (negative) or 1 (positive).
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

DOMAINS = {"films": "imdb", "products": "amazon_cells", "restaurants": "yelp"}
LABELS = {"0": "negative", "1": "positive"}

for domain, source in DOMAINS.items():
    lines = (Path(sys.argv[1]) / f"{source}_labelled.txt").read_text("utf-8").split("\n")
    pairs = [line.rpartition("\t") for line in lines if line.strip()]
    target = Path(__file__).parent / "texts" / f"{domain}.csv"
    with target.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(["text", "label"])
        table.writerows((text.strip(), LABELS[label.strip()]) for text, _, label in pairs)
