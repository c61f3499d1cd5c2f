"""What the sites of the latest runs said of themselves, for ``fairflower deploy sites``."""

import json
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from fairflower.files import replacing
from fairflower.paths import home, read_text
from fairflower.server.registration import ClientRegistry


def note_sites(registry: ClientRegistry) -> None:
    """Note the descriptions of a run's sites that are registered by name, by their keys."""
    now = datetime.now(UTC).isoformat(timespec="minutes")
    said = {
        key.fingerprint: {"about": registry.about(client), "at": now}
        for client, key in registry.keys.items()
        if registry.sites and client in registry.infos
    }
    if said:
        with suppress(OSError), replacing(_path()) as file:  # a full disk ends the run elsewhere
            file.write_text(json.dumps(known_sites() | said, indent=2) + "\n", encoding="utf-8")


def known_sites() -> dict[str, dict[str, str]]:
    """Return what was noted, by the fingerprint of a site's key; nothing if there is no file."""
    with suppress(OSError, ValueError):
        known = json.loads(read_text(_path()))
        return dict(known) if isinstance(known, dict) else {}
    return {}


def _path() -> Path:
    return home() / "sites.json"
