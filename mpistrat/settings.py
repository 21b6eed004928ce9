"""Every ``MPISTRAT_*`` environment variable: name, type, default, meaning.

File law: nothing is read at import; a setting is read when it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mpistrat.errors import SettingError

__all__ = [
    "ABORT",
    "ALGORITHM",
    "ALLOW_SHARED_GPU",
    "CHECK",
    "CHUNK_BYTES",
    "DEVICE",
    "INTER_TRANSPORT",
    "INTRA_TRANSPORT",
    "MAX_MESSAGE_BYTES",
    "MPI_GPU",
    "ONE_SHOT_BYTES",
    "PEER_MEMORY",
    "SETTINGS",
    "SHARED",
    "STALL_SECONDS",
    "STRICT",
    "TIMELINE",
    "TIMEOUT_SECONDS",
    "TUNING",
    "VERBOSE",
    "VIRTUAL_NODES",
    "Setting",
    "misspelt",
    "misspelt_text",
    "parse_bytes",
]

T = TypeVar("T")

_PREFIX = "MPISTRAT_"
_INTERNAL = ("RANK_PID",)  # set by ranks for the processes that they start

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One environment variable.

    Attributes
    ----------
    name : str
        The variable, ``MPISTRAT_…``.
    parse : callable
        Turns the text into a value; raises a ValueError that lists the accepted values.
    default : object
        The value where the variable is unset or empty.
    meaning : str
        One sentence for the reference page.
    """

    name: str
    parse: Callable[[str], T]
    default: T
    meaning: str

    def read(self, environ: Mapping[str, str] | None = None) -> T:
        """Return the value of this setting now.

        Parameters
        ----------
        environ : mapping, optional
            Where to look; the process's environment by default.

        Raises
        ------
        SettingError
            If the variable is set to a value that the setting does not accept.
        """
        text = (os.environ if environ is None else environ).get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise SettingError(f"{self.name}={text!r} was found; {error}. Meaning: {self.meaning}") from error


def misspelt(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the unknown ``MPISTRAT_…`` variables, each with the nearest known name or an empty string.

    Parameters
    ----------
    environ : mapping, optional
        Where to look; the process's environment by default.
    """
    wanted = [setting.name.removeprefix(_PREFIX) for setting in SETTINGS]
    names = sorted(name for name in (os.environ if environ is None else environ) if name.upper().startswith(_PREFIX))
    unknown = [name for name in names if name not in {_PREFIX + known for known in (*wanted, *_INTERNAL)}]
    if not unknown:
        return {}
    import difflib

    near = {name: difflib.get_close_matches(name[len(_PREFIX) :].upper(), wanted, 1) for name in unknown}
    return {name: "".join(_PREFIX + match for match in matches) for name, matches in near.items()}


def misspelt_text(name: str, near: str) -> str:
    """Return the warning about an unknown variable; `near` is the name that `misspelt` suggests for it."""
    return f"{name} is set, but is not a setting of mpistrat" + (f"; did you mean {near}?" if near else "")


def parse_bytes(text: str) -> int:
    """Return the number of bytes in a text such as ``64MiB``, ``1.5 KiB``, ``8`` or ``1GB``.

    Raises
    ------
    ValueError
        If the text is not a number followed by one of B, KiB, MiB, GiB, KB, MB, GB.
    """
    compact = text.replace(" ", "")
    digits = compact.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = compact[len(digits) :].upper()
    try:
        amount = float(digits) * _UNITS[unit]
        count = int(amount)
    except (ValueError, KeyError, OverflowError):
        accepted = "a number and B, KiB, MiB, GiB, KB, MB or GB are accepted, for example 64MiB"
        raise ValueError(f"{text!r} is not a size: {accepted}") from None
    if count < 0 or count != amount:
        raise ValueError(f"{text!r} is not a whole, non-negative number of bytes")
    return count


def _parse_bool(text: str) -> bool:
    table = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if text.lower() not in table:
        raise ValueError("1, true, yes, on, 0, false, no and off are accepted")
    return table[text.lower()]


def _parse_seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0:
        raise ValueError("a number of seconds >= 0 is accepted")
    return seconds


def _one_of(*names: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.lower() not in names:
            raise ValueError(f"{', '.join(names)} are accepted")
        return text.lower()

    return parse


VIRTUAL_NODES = Setting(
    "MPISTRAT_VIRTUAL_NODES",
    str,
    "",
    "Treat the ranks as if they were placed on nodes of this shape: 2x2, 3+1, 2x2:cyclic. Empty: the real nodes.",
)
DEVICE = Setting(
    "MPISTRAT_DEVICE",
    _one_of("auto", "gpu", "cpu"),
    "auto",
    "The device that ranks compute on: auto (a GPU if CuPy is installed and finds one), gpu (an error if there is none) or cpu "
    "(no GPU is looked for).",
)
ALLOW_SHARED_GPU = Setting("MPISTRAT_ALLOW_SHARED_GPU", _parse_bool, False, "Let several ranks share one GPU, for tests.")
CHECK = Setting(
    "MPISTRAT_CHECK",
    _parse_bool,
    True,
    "Compare the collective calls of all ranks. Off: ranks that make different calls get wrong results or hang.",
)
STRICT = Setting(
    "MPISTRAT_STRICT",
    _parse_bool,
    False,
    "Compare each call completely before its result is returned, instead of leaving part of the comparison to a later call.",
)
ABORT = Setting("MPISTRAT_ABORT", _parse_bool, True, "Abort the whole job when one rank has an uncaught exception.")
TRACEBACK = Setting(
    "MPISTRAT_TRACEBACK",
    _one_of("short", "full"),
    "short",
    "Whether the traceback of an uncaught exception in a job of several ranks shows the frames inside this library (full), or "
    "ends with the last line of the program (short).",
)
ALGORITHM = Setting(
    "MPISTRAT_ALGORITHM",
    _one_of("auto", "flat", "leader", "hierarchical", "pipelined"),
    "auto",
    "The all-reduce algorithm of calls that do not name one.",
)
CHUNK_BYTES = Setting(
    "MPISTRAT_CHUNK_BYTES", parse_bytes, 0, "The chunk size of a pipelined all-reduce. 0: chosen by the planner."
)
MAX_MESSAGE_BYTES = Setting(
    "MPISTRAT_MAX_MESSAGE_BYTES", parse_bytes, 2**30, "The largest message passed to MPI in one call; larger ones are split."
)
INTRA_TRANSPORT = Setting(
    "MPISTRAT_INTRA_TRANSPORT",
    _one_of("auto", "shared_memory", "mpi", "nccl", "cuda_ipc", "staged"),
    "auto",
    "The transport between ranks of one node: shared_memory or mpi for arrays in host memory; nccl, cuda_ipc, or staged "
    "(through host memory; mpi means the same) for arrays on GPUs.",
)
INTER_TRANSPORT = Setting(
    "MPISTRAT_INTER_TRANSPORT",
    _one_of("auto", "mpi_ring", "mpi", "nccl"),
    "auto",
    "The transport between nodes: mpi_ring or mpi, over which arrays on GPUs are staged through host memory; nccl for arrays "
    "on GPUs. With auto, what mpistrat tune has measured decides whether arrays on GPUs use NCCL, and MPISTRAT_MPI_GPU how MPI "
    "gets them.",
)
MPI_GPU = Setting(
    "MPISTRAT_MPI_GPU",
    _one_of("auto", "on", "off"),
    "auto",
    "Whether GPU memory is passed to MPI directly: on, off (staged through host memory) or auto (on if the MPI library is "
    "CUDA-aware, which is tested once and cached). Rank 0 reads it for all ranks.",
)
ONE_SHOT_BYTES: Setting[int | None] = Setting(
    "MPISTRAT_ONE_SHOT_BYTES",
    parse_bytes,
    None,
    "The largest buffer of which cuda_ipc lets each GPU of a node read and sum everything, after one barrier of the ranks; in "
    "larger ones each sums a part, with two barriers. Unset: as mpistrat tune has measured, else 256KiB.",
)
PEER_MEMORY = Setting(
    "MPISTRAT_PEER_MEMORY",
    _parse_bool,
    True,
    "Ranks of a node may read and write each other's arrays directly (cross-memory attach), if the kernel permits it.",
)
TUNING = Setting(
    "MPISTRAT_TUNING",
    str,
    "auto",
    "The measurements by which auto chooses algorithms: auto (the file that mpistrat tune wrote for this cluster and rank "
    "placement, if there is one), measure (the same; if there is none, creating a strategy runs the benchmark), off (the "
    "built-in constants), or the path of such a file. Rank 0 reads it for all ranks.",
)
TIMEOUT_SECONDS = Setting(
    "MPISTRAT_TIMEOUT_SECONDS", _parse_seconds, 0.0, "Deadline in seconds of collectives that set none themselves. 0: none."
)
STALL_SECONDS = Setting(
    "MPISTRAT_STALL_SECONDS",
    _parse_seconds,
    30.0,
    "When a rank has waited this long in a collective, one rank prints which ranks are missing and what they are doing; again "
    "after twice the time. 0: never.",
)
TIMELINE = Setting(
    "MPISTRAT_TIMELINE",
    str,
    "",
    "A trace file, trace.json for example, with the timeline of every rank, which rank 0 writes at exit; open it at "
    "ui.perfetto.dev. Empty: none.",
)
VERBOSE = Setting(
    "MPISTRAT_VERBOSE", _parse_bool, False, "Rank 0 prints the nodes that it found, and each plan that is chosen and why."
)

SETTINGS: tuple[Setting[Any], ...] = (
    VIRTUAL_NODES,
    DEVICE,
    ALLOW_SHARED_GPU,
    CHECK,
    STRICT,
    ABORT,
    TRACEBACK,
    ALGORITHM,
    CHUNK_BYTES,
    MAX_MESSAGE_BYTES,
    INTRA_TRANSPORT,
    INTER_TRANSPORT,
    MPI_GPU,
    ONE_SHOT_BYTES,
    PEER_MEMORY,
    TUNING,
    TIMEOUT_SECONDS,
    STALL_SECONDS,
    TIMELINE,
    VERBOSE,
)

# must have the same value on all ranks, or they would plan and send differently
SHARED: tuple[Setting[Any], ...] = (
    CHECK,
    STRICT,
    ALGORITHM,
    CHUNK_BYTES,
    MAX_MESSAGE_BYTES,
    INTRA_TRANSPORT,
    INTER_TRANSPORT,
    ONE_SHOT_BYTES,
)
