"""The machine that a run folder records, from /proc/cpuinfo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sklearn
import torch

from fairflower import machine
from fairflower.config import RunConfig
from fairflower.server.folder import RunFolder, lock_folder

AMD = """\
processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 1
model name\t: AMD EPYC
flags\t\t: fpu sse2 avx avx2 vaes
power management:

processor\t: 1
flags\t\t: fpu avx512f
"""
INTEL = """\
processor\t: 0
cpu family\t: 6
model\t\t: 143
model name\t: Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz
flags\t\t: avx2 avx512f avx512_bf16 amx_bf16 amx_tile
"""
ARM = """\
processor\t: 0
Features\t: fp asimd sve
CPU implementer\t: 0x41
CPU part\t: 0xd40
"""


@pytest.mark.parametrize(
    ("cpuinfo", "name", "instructions"),
    [
        (AMD, "AMD EPYC family 25 model 1", ["avx2"]),
        (
            INTEL,
            "Intel(R) Xeon(R) Platinum 8481C CPU @ 2.70GHz family 6 model 143",
            ["avx2", "avx512f", "amx_tile"],
        ),
        (ARM, "CPU implementer 0x41 CPU part 0xd40", ["asimd", "sve"]),
        ("", "", []),
    ],
)
def test_processors_are_read_from_cpuinfo(cpuinfo: str, name: str, instructions: list[str]) -> None:
    assert machine.processor(cpuinfo) == (name, instructions)


def test_a_run_folder_records_the_versions_of_the_needed_solvers(tmp_path: Path) -> None:
    versions = {}
    for name in ("fedavg", "fedgcr"):
        config = RunConfig.from_flat({"output-dir": str(tmp_path), "strategy.name": name})
        folder = RunFolder.create(config, {"domains": [], "clients": []})
        folder.finish("stopped")
        versions[name] = json.loads((folder.path / "run.json").read_text())["versions"]
    assert {*versions["fedgcr"]} - {*versions["fedavg"]} == {"cvxpy", "scikit-learn", "scipy"}
    assert versions["fedgcr"]["scikit-learn"] == sklearn.__version__


def test_a_run_folder_records_the_machine_of_every_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    monkeypatch.setattr(machine, "_CPUINFO", cpuinfo)
    config = RunConfig.from_flat({"output-dir": str(tmp_path)})
    client = {"client_id": 0, "domain": "a", "num_examples": 1, "class_counts": [1]}
    federation = {"domains": ["a"], "clients": [client]}

    def facts(folder: RunFolder) -> Any:
        folder.finish("stopped")
        return json.loads((folder.path / "run.json").read_text())

    cpuinfo.write_text(AMD)
    folder = RunFolder.create(config, federation)
    first = facts(folder)
    assert first["machine"]["processor"] == "AMD EPYC family 25 model 1"
    assert first["machine"]["instructions"] == "avx2"
    assert first["machine"]["kernels"] == torch.backends.cpu.get_cpu_capability()
    assert first["versions"]["torch"] == torch.__version__.partition("+")[0]
    # An older folder without these facts can be resumed; the new session records its own.
    old = first | {"machine": {"system": "Linux", "machine": "x86_64", "cpus": 2}}
    (folder.path / "run.json").write_text(json.dumps(old))
    cpuinfo.write_text(INTEL)
    again = facts(RunFolder.reopen(folder.path, config, federation, lock=lock_folder(folder.path)))
    assert again["machine"] == old["machine"]
    assert again["resumed"][0]["machine"]["instructions"] == "avx2 avx512f amx_tile"
