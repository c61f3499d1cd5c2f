"""Servers that invent sites, swap keys or tell sites different things, and sites that sign."""

from __future__ import annotations

from base64 import b64decode, b64encode
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command import call
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from curious_server import flat
from flwr.app import ConfigRecord, Message, MetricRecord
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from lying_server import LyingServer, Refusal, Signed
from secure_federation import SecureFederation, raise_at

from fairflower.arrays import record_of
from fairflower.deploy.credentials import make_key_pair
from fairflower.engines.inline import FIRST_NODE
from fairflower.errors import ConfigError
from fairflower.secure.client import REFUSED
from fairflower.secure.consortium import Consortium, read_sites
from fairflower.secure.protocol import SIGNED, Halted
from fairflower.strategies import Uniform

# Sites mark their answers there, and the Flower runs of all tests have the same id.
pytestmark = pytest.mark.usefixtures("own_home")

#: Stories in which all five sites know each other.
FIVE = {k: range(5) for k in range(5)}

#: Stories of eight sites, each of which is told of four others, and who has failed: three sites say
#: so of each of the four whom site 0 knows, so that their keys can be restored, and nobody of it.
EIGHT = {k: [(k + d) % 8 for d in range(-2, 3)] for k in range(8)}
GONE = {1: [2, 7], 2: [1], 3: [1, 2], 4: [2, 6], 5: [6, 7], 6: [7], 7: [1, 6]}

#: Three of the five, who say so of each other, but not of sites 0 and 1.
THREE_GONE = {0: [2, 3], 1: [3, 4], 2: [3, 4], 3: [2, 4], 4: [2, 3]}

NAMES = ("north", "south", "east", "west", "center", "coast", "hill", "island")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sites' keys, and the file with their names and public keys."""
    folder = tmp_path_factory.mktemp("consortium")
    lines = [f"{name} {make_key_pair(folder / name).read_text()}" for name in NAMES]
    (folder / "sites").write_text("# The sites of our study\n\n" + "\n".join(lines))
    make_key_pair(folder / "stranger")
    return folder


def named(count: int) -> dict[int, str]:
    return dict(enumerate(NAMES[:count]))


def signature(folder: Path, name: str, key: str, *place: Any) -> Signed:
    """Return what a site's key signs for a run, a round, a node and a pair of keys."""
    private: Any = load_ssh_private_key((folder / key).read_bytes(), None)
    sites = read_sites(folder / "sites")
    *round_of_run, node, pair = place
    record: Any = Consortium(sites, name, private).sign_keys(round_of_run, node, pair)
    return name, record["signature"]


def test_sites_with_a_consortium_compute_the_same_model(folder: Path) -> None:
    plain, signed = SecureFederation(Uniform()), signing(folder, *range(5))
    for _ in range(2):
        np.testing.assert_array_equal(flat(plain.train()), flat(signed.train()))
    assert signed.strategy.dropped == {}


# --- keys ----------------------------------------------------------------------------------

#: What the server says of the keys of its inventions -> why the site refuses.
FORGERIES: dict[str, tuple[Any, str]] = {
    "invented": (
        lambda folder, k, pair: signature(
            folder, f"new {k}", "stranger", 1, 1, FIRST_NODE + k, pair
        ),
        "got keys of a site 'new 1', which its consortium file does not have",
    ),
    "unsigned": (lambda folder, k, pair: ("", b""), "got keys without a signature"),
    "another's signature": (
        lambda folder, k, pair: signature(folder, NAMES[k], "stranger", 1, 1, FIRST_NODE + k, pair),
        "keys of site 'south' that this site has not signed",
    ),
    "swapped keys": (
        lambda folder, k, pair: signature(
            folder, NAMES[k], NAMES[k], 1, 1, FIRST_NODE + k, pair[::-1]
        ),
        "keys of site 'south' that this site has not signed",
    ),
    "another round": (
        lambda folder, k, pair: signature(folder, NAMES[k], NAMES[k], 1, 0, FIRST_NODE + k, pair),
        "has not signed for this round of this run",
    ),
    "another run": (
        lambda folder, k, pair: signature(folder, NAMES[k], NAMES[k], 2, 1, FIRST_NODE + k, pair),
        "has not signed for this round of this run",
    ),
    "another node": (
        lambda folder, k, pair: signature(folder, NAMES[k], NAMES[k], 1, 1, 7, pair),
        "has not signed for this round of this run",
    ),
    "one site as four": (
        lambda folder, k, pair: signature(folder, "south", "south", 1, 1, FIRST_NODE + k, pair),
        "got keys of a site that is named twice",
    ),
    "the site itself": (
        lambda folder, k, pair: signature(
            folder, NAMES[k - 1], NAMES[k - 1], 1, 1, FIRST_NODE + k, pair
        ),
        "got keys of a site that is named twice",
    ),
}


def inventor(folder: Path, forge: Any) -> LyingServer:
    """Return a server that invents all sites but the first, which has a consortium file."""
    server = LyingServer(FIVE, own=(1, 2, 3, 4))
    server.forge_keys = lambda k, pair, own: forge(folder, k, pair) if k else own
    server.sign_with(folder, {0: "north"})
    return server


@pytest.mark.parametrize("case", FORGERIES)
def test_a_server_that_invents_sites_is_refused(
    case: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    forge, reason = FORGERIES[case]
    with pytest.raises(Refusal, match=reason):
        inventor(folder, forge).run()
    assert reason in caplog.text


def test_a_server_that_invents_sites_reads_an_update_if_nothing_is_signed(folder: Path) -> None:
    server = inventor(folder, FORGERIES["unsigned"][0])
    server.node_config(0).pop("consortium")
    server.run()
    np.testing.assert_allclose(server.stolen(0), server.update(0), rtol=0, atol=1e-6)


def test_a_server_with_the_private_keys_of_all_others_reads_an_update(folder: Path) -> None:
    """So only the signatures stop the others."""
    server = inventor(
        folder,
        lambda folder, k, pair: signature(folder, NAMES[k], NAMES[k], 1, 1, FIRST_NODE + k, pair),
    )
    server.run()
    np.testing.assert_allclose(server.stolen(0), server.update(0), rtol=0, atol=1e-6)


# --- lists ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stories", "gone", "victims"), [(EIGHT, GONE, [0]), (FIVE, THREE_GONE, [0, 1])]
)
def test_a_server_with_another_story_for_each_site_reads_updates_only_without_signatures(
    stories: Any, gone: Any, victims: list[int], folder: Path
) -> None:
    server = LyingServer(stories, gone)
    server.run()
    np.testing.assert_allclose(server.stolen(*victims), server.update(*victims), atol=1e-6)
    signing = LyingServer(stories, gone)
    signing.sign_with(folder, named(len(stories)))
    with pytest.raises(Refusal, match=r"'north' (keeps the masks: [12] sites have|signs no)"):
        signing.run()


def few_signatures(signed: dict[int, bytes]) -> dict[int, bytes]:
    return {0: signed[0], 1: signed[1]}


def one_signature_often(signed: dict[int, bytes]) -> dict[int, bytes]:
    return {**dict.fromkeys(signed, signed[1]), 0: signed[0]}


@pytest.mark.parametrize("forge", [few_signatures, one_signature_often])
def test_a_list_that_fewer_than_the_threshold_signed_is_refused(forge: Any, folder: Path) -> None:
    server = LyingServer(FIVE)
    server.sign_with(folder, named(5))
    server.forge_lists = forge
    with pytest.raises(Refusal, match=r"keeps the masks: 2 sites have signed .* but 3 must"):
        server.run()


def test_three_of_five_signatures_are_enough(folder: Path) -> None:
    server = LyingServer(FIVE, {k: [4] for k in range(4)} | {4: []})
    server.sign_with(folder, named(5))
    server.forge_lists = lambda signed: {k: signed[k] for k in (0, 1, 2)}
    with pytest.raises(Refusal, match="'center' keeps the masks: 0 sites"):
        server.run()  # the fifth is told that it is present, and the others that it is not
    np.testing.assert_allclose(server.stolen(0, 1, 2, 3), server.update(0, 1, 2, 3), atol=1e-6)


def test_a_site_with_other_settings_than_the_others_is_in_no_sum(folder: Path) -> None:
    """Without signatures the sum would be mostly this site's update; see `test_attacks.py`."""
    unsigned, signed = LyingServer(FIVE), LyingServer(FIVE)
    for server in (unsigned, signed):
        server.told, server.goes_on = {0: {"train.lr": 30.0}}, True
    signed.sign_with(folder, named(5))
    unsigned.run()
    np.testing.assert_allclose(unsigned.stolen(*range(5)), unsigned.update(*range(5)), atol=1e-4)
    signed.run()
    assert not signed.shares
    for k, (of_list, of_shares) in signed.refusals.items():
        assert f"{NAMES[k]!r} signs no list with site {NAMES[0 if k else 1]!r}" in of_list
        assert "keeps the masks: 0 sites have signed" in of_shares


@pytest.mark.parametrize("told", ["measure", "federation", "array"])
def test_what_a_site_is_told_beside_its_settings_and_model_is_signed_too(
    told: str, folder: Path
) -> None:
    server = LyingServer(FIVE)
    if told == "array":
        server.beside = {0: {"control": record_of({"w": np.ones(2)})}}
    else:
        server.told = {0: {told: ""}}
    server.sign_with(folder, named(5))
    with pytest.raises(Refusal, match="'north' signs no list with site 'south'"):
        server.run()


@pytest.mark.parametrize("forge", [lambda _: b"", lambda signed: signed[3]])
def test_no_list_is_signed_with_a_site_that_signed_no_request(forge: Any, folder: Path) -> None:
    server = LyingServer(FIVE)
    server.sign_with(folder, named(5))
    server.forge_requests = lambda signed: {**signed, 4: forge(signed)}
    with pytest.raises(Refusal, match="'north' signs no list with site 'center'"):
        server.run()


def test_a_site_signs_one_list_in_a_set_up(folder: Path) -> None:
    server = LyingServer(FIVE)
    server.sign_with(folder, named(5))
    step = {"stage": "sign_list", "active_nids": [FIRST_NODE + k for k in range(3)]}
    server.forge_lists = lambda _: server.ask(0, {RECORD_KEY_CONFIGS: ConfigRecord(step)})  # type: ignore[arg-type]
    with pytest.raises(Refusal, match="this client did not answer the server"):
        server.run()


def test_a_site_signs_no_list_of_fewer_sites_than_the_threshold(folder: Path) -> None:
    server = LyingServer(FIVE, {0: [1, 2, 3]})
    server.sign_with(folder, named(5))
    with pytest.raises(Refusal, match="does not sign a list of 2 present sites; at least 3 must"):
        server.run()


# --- honest servers ------------------------------------------------------------------------


def signing(folder: Path, *sites: int) -> SecureFederation:
    """Return a federation in which these of five sites have a consortium file."""
    federation = SecureFederation(Uniform())
    for k in sites:
        files = {"consortium": str(folder / "sites"), "signing-key": str(folder / NAMES[k])}
        federation.grid.contexts[FIRST_NODE + k].node_config.update(files)
    return federation


def test_sites_with_a_consortium_go_on_without_one_that_does_not_sign(folder: Path) -> None:
    federation = signing(folder, 0, 1, 2, 3)
    federation.train()
    assert federation.strategy.client_ids == (0, 1, 2, 3)
    assert "its node config has no consortium" in federation.strategy.dropped[4]


@pytest.mark.parametrize(
    "stage", ["setup", "share_keys", "collect_masked_vectors", "sign_list", "unmask"]
)
def test_sites_with_a_consortium_go_on_without_one_that_fails(stage: str, folder: Path) -> None:
    federation, plain = signing(folder, *range(5)), SecureFederation(Uniform())
    federation.disturb = raise_at(stage, 4)
    plain.disturb = raise_at("unmask" if stage == "sign_list" else stage, 4)
    np.testing.assert_array_equal(flat(federation.train()), flat(plain.train()))


@pytest.mark.parametrize(
    "record", [None, ConfigRecord({"signature": 5}), MetricRecord({"signature": 5})]
)
def test_a_round_ends_without_a_sum_if_a_site_signs_no_request(
    record: Any, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = signing(folder, *range(5))

    def forge(stage: str, k: int, reply: Message) -> None:
        if (stage, k) == ("collect_masked_vectors", 4):
            del reply.content[SIGNED]
            if record is not None:
                reply.content[SIGNED] = record

    federation.after = forge
    with pytest.raises(Halted, match="0 of 5 clients helped to remove the masks"):
        federation.train()
    assert "site 'north' signs no list with site 'center'" in caplog.text


def test_a_round_ends_without_a_sum_if_too_few_sign_the_list(folder: Path) -> None:
    federation = signing(folder, *range(5))
    federation.disturb = raise_at("sign_list", 2, 3, 4)
    with pytest.raises(Halted, match="0 of 5 clients helped to remove the masks"):
        federation.train()


def test_a_site_with_a_consortium_sends_no_plain_model(folder: Path) -> None:
    federation = signing(folder, 0)
    federation.secure = False
    federation.train()
    assert "asked for an unmasked model" in federation.strategy.dropped[0]


def test_a_site_with_a_consortium_refuses_more_sites_than_see_each_other(folder: Path) -> None:
    server = LyingServer({k: range(34) for k in range(34)})
    server.sign_with(folder, {0: "north"})
    with pytest.raises(Refusal, match="sums up to 33 sites"):
        server.run()


# --- the file ------------------------------------------------------------------------------


def test_fingerprints_are_those_of_openssh(folder: Path) -> None:
    output = call("deploy", "fingerprints", str(folder / "sites"), "--key", str(folder / "south"))
    lines = dict(reversed(line.split(maxsplit=1)) for line in output.splitlines())
    assert [*lines] == [NAMES[0], "south  (this site)", *NAMES[2:]]
    for name, shown in lines.items():
        blob = b64decode((folder / f"{name.split()[0]}.pub").read_text().split()[1])
        assert shown == "SHA256:" + b64encode(sha256(blob).digest()).decode().rstrip("=")


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda lines: [*lines, "north"], "line 9: expected the site's name, a space, and"),
        (lambda lines: [*lines, "more ssh-rsa AAAA"], "line 9: expected the site's name"),
        (lambda lines: [*lines, lines[0]], "line 9: 'north' has the name or the key of 'north'"),
        (lambda lines: [*lines, lines[1].replace("south", "a")], "'a' has .* the key of 'south'"),
        (lambda lines: lines[:2], "2 sites, expected at least 3"),
        (lambda lines: lines[1:], "does not have the public key of signing-key"),
    ],
)
def test_a_wrong_file_is_refused_with_its_line(
    change: Any, error: str, folder: Path, tmp_path: Path
) -> None:
    lines = [line for line in (folder / "sites").read_text().splitlines() if "ecdsa" in line]
    path = tmp_path / "sites"
    path.write_text("\n".join(change(lines)))
    with pytest.raises(ConfigError, match=error):
        Consortium.of({"consortium": str(path), "signing-key": str(folder / "north")})


def test_a_wrong_key_is_refused(folder: Path) -> None:
    for path in (folder / "missing", folder / "north.pub"):
        with pytest.raises(ConfigError, match=r"signing-key = .*no private key"):
            Consortium.of({"consortium": str(folder / "sites"), "signing-key": str(path)})


def test_a_site_whose_files_are_wrong_says_why_only_in_its_own_log(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = signing(folder, *range(5))
    federation.grid.contexts[FIRST_NODE].node_config["consortium"] = str(folder / "nowhere")
    federation.train()
    assert federation.strategy.dropped == {0: REFUSED}
    assert "nowhere" in caplog.text
