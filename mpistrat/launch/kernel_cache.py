"""Where CuPy caches the kernels that it compiles: on the node, if the home folder is on a network file system.

There ranks of all nodes would read and write the same files at the same moment, when they first use a GPU.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

__all__ = ["cache_on_node", "file_system_of"]

_VARIABLE = "CUPY_CACHE_DIR"
_NETWORK = {"nfs", "nfs4", "lustre", "gpfs", "beegfs", "beegfs_nodev", "ceph", "fuse.ceph", "cifs", "smb3", "afs", "panfs"}
_NETWORK |= {"glusterfs", "fuse.glusterfs", "fuse.sshfs", "pvfs2", "wekafs", "dvs", "9p"}


def cache_on_node(mounts: Path = Path("/proc/mounts")) -> None:
    """Set CUPY_CACHE_DIR to a folder of this node, unless it is set or the home folder is on the node.

    Parameters
    ----------
    mounts : Path
        The kernel's table of what is mounted.
    """
    if _VARIABLE in os.environ:
        return
    try:
        if file_system_of(Path.home().resolve(), mounts.read_text()) in _NETWORK:
            os.environ[_VARIABLE] = str(_own_folder())
    except (OSError, RuntimeError):  # no home directory, or the folder cannot be made: CuPy's default stays
        return


def file_system_of(path: Path, mounts: str) -> str:
    """Return the type of the file system that a path is on, such as ``nfs4``."""
    found, longest = "", -1
    for line in mounts.splitlines():
        _, place, kind, *_ = line.split(" ")
        point = Path(place.replace(r"\040", " "))
        # of two at one place the later one covers the other
        if path.is_relative_to(point) and len(point.parts) >= longest:
            found, longest = kind, len(point.parts)
    return found


def _own_folder() -> Path:
    """Return a folder for temporary files that nobody else can write to: kernels are run as they are found there.

    Raises
    ------
    OSError
        If somebody else has made it, or may write to it.
    """
    folder = Path(tempfile.gettempdir()) / f"mpistrat-kernels-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise OSError(f"{folder} is not only ours")
    return folder
