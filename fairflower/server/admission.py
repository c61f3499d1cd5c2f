"""Sites that join a run between two rounds (``late-sites``), and sites that withdraw."""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from flwr.app import Message

from fairflower.config.site import WITHDRAWN
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


def note_withdrawn(
    setup: RunSetup,
    folder: RunFolder,
    server_round: int,
    asked: Mapping[str, int],
    replies: Iterable[Message],
) -> None:
    """Note the sites that say in this round that they have withdrawn.

    ``asked`` has the client of each message by its id.
    """
    gone = [reply for reply in replies if reply.has_error() and reply.error.reason == WITHDRAWN]
    for client in (asked[reply.metadata.reply_to_message_id] for reply in gone):
        known = folder.fact("withdrawn") or {}
        if str(client) not in known:
            name = setup.registry.name_of(client)
            logger.warning("%s has withdrawn, and is asked no more in this run.", name)
            folder.note("withdrawn", known | {str(client): server_round})


def leave_out(
    setup: RunSetup, tracker: NodeTracker, folder: RunFolder, nodes: Mapping[int, int]
) -> RunSetup:
    """Return the setup, in which sites that have withdrawn are enrolled no more."""
    gone = frozenset(map(int, folder.fact("withdrawn") or ()))
    if gone == setup.registry.withdrawn:
        return setup
    tracker.registry = replace(setup.registry, withdrawn=gone)
    setup = replace(setup, registry=tracker.registry)
    setup.enroll(nodes)
    return setup
