"""CuPy's kernel cache: on the node if the home folder is on a network file system, unless the user has said where."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mpistrat.launch.kernel_cache import cache_on_node, file_system_of

MOUNTS = r"""overlay / overlay rw 0 0
server:/home /home nfs4 rw 0 0
server:/my\040home /my\040home lustre rw 0 0
tmpfs /home/ann/local tmpfs rw 0 0
autofs /data autofs rw 0 0
server:/data /data nfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/root", "overlay"),
        ("/home/ann", "nfs4"),
        ("/homes", "overlay"),
        ("/my home/x", "lustre"),
        ("/home/ann/local/a", "tmpfs"),
        ("/data/a", "nfs"),
    ],
)
def test_the_file_system_of_a_path(path, kind):
    assert file_system_of(Path(path), MOUNTS) == kind


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Give a home folder, and a folder for temporary files."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("CUPY_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def mounted(home, kind):
    table = home / "mounts"
    table.write_text(f"overlay / overlay rw 0 0\nserver:/home {home}/home {kind} rw 0 0\n")
    return table


def test_a_home_on_the_network_keeps_no_kernels(home, monkeypatch):
    cache_on_node(mounted(home, "nfs4"))
    folder = Path(os.environ["CUPY_CACHE_DIR"])
    assert folder == home / f"mpistrat-kernels-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    monkeypatch.delenv("CUPY_CACHE_DIR")


def test_a_home_on_the_node_and_what_the_user_has_set_stay(home, monkeypatch):
    cache_on_node(mounted(home, "ext4"))
    assert "CUPY_CACHE_DIR" not in os.environ
    monkeypatch.setenv("CUPY_CACHE_DIR", "/mine")
    cache_on_node(mounted(home, "nfs4"))
    assert os.environ["CUPY_CACHE_DIR"] == "/mine"


def test_a_folder_that_others_may_write_to_is_not_used(home):
    folder = home / f"mpistrat-kernels-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o777)
    cache_on_node(mounted(home, "nfs4"))
    folder.chmod(0o700)
    folder.rmdir()
    folder.symlink_to(home)
    cache_on_node(mounted(home, "nfs4"))
    assert "CUPY_CACHE_DIR" not in os.environ
