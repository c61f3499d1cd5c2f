"""Sites that join a run between two rounds (``late-sites``), and sites that withdraw."""

from collections.abc import Iterable, Mapping

from flwr.app import Message

from fairflower.config.site import WITHDRAWN
from fairflower.config.text import names_in
from fairflower.errors import DataError, logger
from fairflower.server.folder import RunFolder
from fairflower.server.known_sites import note_sites
from fairflower.server.registration import NodeTracker
from fairflower.server.setup import RunSetup


def admit(setup: RunSetup, tracker: NodeTracker, folder: RunFolder, server_round: int) -> bool:
    """Add the late sites that have connected; return whether there were any.

    The run folder gets the new clients, and a site whose data do not fit the model is named in the
    log and left out.
    """
    registry, before = setup.registry, len(setup.federation.clients)
    late = names_in(setup.config.late_sites)
    for node, info in tracker.newcomers(late).items() if late else ():
        try:
            client = registry.add_site(node, info)
        except DataError as error:
            tracker.leave_out(node, f"its data do not fit this run: {error}")
            continue
        logger.info("Round %d: %s joins: %s", server_round, info.title, registry.about(client))
        folder.admit(setup.facts(), server_round)
        note_sites(registry)
    return len(setup.federation.clients) > before


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


def leave_out(setup: RunSetup, folder: RunFolder) -> None:
    """Enroll the sites no more that have withdrawn, from the next messages on."""
    gone = frozenset(map(int, folder.fact("withdrawn") or ()))
    if gone != setup.registry.withdrawn:
        setup.registry.withdrawn = gone
        setup.enroll()
