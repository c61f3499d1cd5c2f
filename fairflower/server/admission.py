"""Sites that join a run between two rounds (``late-sites``)."""

from collections.abc import Mapping
from dataclasses import replace

from fairflower.config.text import names_in
from fairflower.errors import DataError, logger
from fairflower.server.folder import RunFolder
from fairflower.server.known_sites import note_sites
from fairflower.server.registration import NodeTracker
from fairflower.server.setup import RunSetup


def admit(
    setup: RunSetup,
    tracker: NodeTracker,
    folder: RunFolder,
    server_round: int,
    nodes: Mapping[int, int],
) -> RunSetup:
    """Return the setup with the late sites that have connected; the same object without any.

    ``nodes`` are the current ones by client. The run folder gets the new clients, and a site whose
    data do not fit the model is named in the log and left out.
    """
    late = names_in(setup.config.late_sites)
    for node, info in tracker.newcomers(nodes, late).items() if late else ():
        try:
            registry = tracker.registry.with_site(node, info)
        except DataError as error:
            tracker.leave_out(node, f"its data do not fit this run: {error}")
            continue
        tracker.registry, client = registry, len(registry.clients) - 1
        assert registry.federation is not None
        setup = replace(setup, federation=registry.federation, registry=registry)
        logger.info("Round %d: %s joins: %s", server_round, info.title, registry.about(client))
        folder.admit(setup.facts(), server_round)
        note_sites(registry)
    return setup
