"""Generate ``fairflower/data/languages.json`` from translations in a wheel of Django.

    pip download --no-deps django==5.2.19
    python experiments/embed_languages.py django-5.2.19-py3-none-any.whl

A text is kept if it is translated in all languages, and in none as another kept text is; of texts
with a plural, the singular is used. Texts are joined by the characters 0, and languages by 1,
compressed with zlib and encoded in base 85, because a Flower app bundle contains only text.
"""

from __future__ import annotations

import argparse
import base64
import gettext
import json
import re
import zlib
from pathlib import Path
from zipfile import ZipFile

#: Language -> its folder in Django.
LANGUAGES = {
    **{"german": "de", "french": "fr", "russian": "ru"},
    **{"greek": "el", "hebrew": "he", "japanese": "ja"},
}
OUTPUT = Path(__file__).parents[1] / "fairflower" / "data" / "languages.json"


def translations(wheel: ZipFile, folder: str) -> dict[tuple[str, str], str]:
    """Return the translations in a language by file, without the language, and English text."""
    found = {}
    for name in sorted(wheel.namelist()):
        if re.search(rf"/locale/{folder}/LC_MESSAGES/\w+\.mo$", name):
            with wheel.open(name) as file:
                # The module has no public way to list the texts.
                catalog = gettext.GNUTranslations(file)._catalog  # type: ignore[attr-defined]
            for key, text in catalog.items():
                english, form = key if isinstance(key, tuple) else (key, 0)
                if english and text and form == 0:
                    found[name.replace(f"/{folder}/", "/"), english] = text
    return found


def packed(source: Path) -> str:
    """Return JSON with the languages, their compressed texts, and the license of the texts."""
    with ZipFile(source) as wheel:
        languages = [translations(wheel, folder) for folder in LANGUAGES.values()]
        (name,) = (n for n in wheel.namelist() if n.endswith("licenses/LICENSE"))
        terms = wheel.read(name).decode()
    kept: list[tuple[str, ...]] = []
    seen: list[set[str]] = [set() for _ in languages]
    for key in sorted(set.intersection(*map(set, languages))):
        texts = tuple(language[key] for language in languages)
        if not any(text in known for text, known in zip(texts, seen, strict=True)):
            kept.append(texts)
            for text, known in zip(texts, seen, strict=True):
                known.add(text)
    joined = "\1".join("\0".join(column) for column in zip(*kept, strict=True))
    deflated = base64.b85encode(zlib.compress(joined.encode(), 9)).decode()
    origin = f"translations in {source.name}, https://www.djangoproject.com"
    content = {"source": origin, "license": terms, "languages": list(LANGUAGES), "texts": deflated}
    return json.dumps(content) + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("source", type=Path)
    OUTPUT.write_text(packed(parser.parse_args().source), encoding="utf-8")
