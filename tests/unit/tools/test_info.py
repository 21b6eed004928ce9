"""mpistrat info: what it gathers, which settings it names, and that it starts no MPI."""

import argparse
import json
import os

import pytest

import mpistrat
from mpistrat import settings
from mpistrat.tools import info


def run(capsys, *words):
    parser = argparse.ArgumentParser(prog="mpistrat info")
    info.add_arguments(parser)
    assert info.execute(parser.parse_args(words)) == 0
    return capsys.readouterr().out


def test_it_tells_versions_the_mpi_and_every_setting_also_of_a_misspelt_name(capsys, monkeypatch):
    monkeypatch.setenv("MPISTRAT_TIMEOUT_SECONDS", "7")
    monkeypatch.setenv("MPISTRAT_CHUNK_BYTES", "many")
    monkeypatch.delenv("MPISTRAT_STALL_SECONDS", raising=False)
    found = json.loads(run(capsys, "--json"))
    assert found["versions"]["mpistrat"] == mpistrat.__version__
    assert found["mpi"]["library"].split(" ")[0] in ("Open", "MPICH", "Intel")
    assert os.access(found["mpi"]["mpiexec"], os.X_OK)
    rows = {row["name"]: row for row in found["settings"]}
    assert [*rows] == [setting.name for setting in settings.SETTINGS]
    assert (rows["MPISTRAT_TIMEOUT_SECONDS"]["value"], rows["MPISTRAT_TIMEOUT_SECONDS"]["origin"]) == (7.0, "environment")
    assert (rows["MPISTRAT_STALL_SECONDS"]["value"], rows["MPISTRAT_STALL_SECONDS"]["origin"]) == (30.0, "default")
    assert "'many' is not a size" in rows["MPISTRAT_CHUNK_BYTES"]["problem"]
    monkeypatch.setenv("MPISTRAT_TIMEOUT", "7")
    assert "MPISTRAT_TIMEOUT is set, but is not a setting of mpistrat; did you mean MPISTRAT_TIMEOUT_SECONDS?\n" in run(capsys)
    known = {"MPISTRAT_STRICT": "1", "PATH": "", "MPISTRAT_RANK_PID": "7"}
    near = {"MPISTRAT_STRICKT": "MPISTRAT_STRICT", "mpistrat_strict": "MPISTRAT_STRICT", "MPISTRAT_WEATHER": ""}
    assert settings.misspelt({**dict.fromkeys(near, "1"), **known}) == near


_CUPY = """
from types import SimpleNamespace as Has
runtime = Has(getDeviceCount=lambda: 1, getDeviceProperties=lambda _: {"name": b"H100"},
              runtimeGetVersion=lambda: 13020, driverGetVersion=lambda: 13000)
nccl = Has(available=%s, get_version=lambda: 23007)
"""


@pytest.mark.parametrize("available", [True, False])
def test_it_asks_cupy_for_gpus_and_nccl_in_another_process(capsys, monkeypatch, tmp_path, available):
    (tmp_path / "cupy").mkdir()
    (tmp_path / "cupy" / "__init__.py").touch()
    (tmp_path / "cupy" / "cuda.py").write_text(_CUPY % available)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = json.loads(run(capsys, "--json"))["gpu"]
    assert [found.pop(name) for name in ("gpus", "CUDA", "CUDA driver")] == [["H100"], "13.2", "13.0"]
    if available:
        assert found.pop("nccl") == "2.30.7"
        assert found.pop("nccl binding").startswith(("CuPy's (nccl4py: ", "nccl4py"))
    else:
        assert found.pop("nccl problem").startswith("CuPy finds no libnccl.so.2")
    assert not found
