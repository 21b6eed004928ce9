"""Every ``MPISTRAT_*`` environment variable: name, type, default, meaning.

Invariant: nothing is read at import; a setting is read when it is asked for.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from mpistrat.errors import InvalidArgumentError, SettingError

T = TypeVar("T")

_PREFIX = "MPISTRAT_"
# no settings: set by ranks for the processes that they start, and by `mpistrat run --max-restarts` for ranks
_INTERNAL = ("MPISTRAT_RANK_PID", "MPISTRAT_RESTART_COUNT", "MPISTRAT_PROGRESS_FILE", "MPISTRAT_FIRST_START")
RANK_PID, RESTART_COUNT, PROGRESS_FILE, FIRST_START = _INTERNAL

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_MOST_SECONDS = 9999 * _SECONDS["d"]  # no clock of the system has less than this


SETTINGS: list[Setting[Any]] = []
"""All settings, in the order of their declarations below."""


@dataclass(frozen=True)
class Setting(Generic[T]):
    """One environment variable; declaring it registers it."""

    name: str
    parse: Callable[[str], T]  # raises a ValueError that lists the accepted values
    default: T  # where the variable is unset or empty
    meaning: str  # one sentence, for the reference page
    is_shared: bool = False  # all ranks must have the same value: else they would plan and send differently

    def __post_init__(self) -> None:
        SETTINGS.append(self)

    def read(self, environ: Mapping[str, str] | None = None) -> T:
        """Return the value of this setting now, in the process's environment by default."""
        text = (os.environ if environ is None else environ).get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise SettingError(f"{self.name}={text!r} was found; {error}. Meaning: {self.meaning}") from error

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it accepts, if there is a list of them."""
        return self.parse.words if isinstance(self.parse, _OneOf) else ()

    def read_or_default(self) -> T:
        """Return the value, or the default of one that cannot be read: all ranks raise that when they make a communicator."""
        try:
            return self.read()
        except SettingError:
            return self.default


def setting(name: str, parse: Callable[[str], T], default: T, is_shared: bool = False) -> Callable[[str], Setting[T]]:
    """Return what declares a setting, when it is called with its meaning."""
    return lambda meaning: Setting(name, parse, default, meaning, is_shared)


class Snapshot:
    """The values of all settings at one moment; `error` says why one of them cannot be read, which has its default here."""

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._values: dict[str, Any] = {}
        self.error: SettingError | None = None
        for setting in SETTINGS:
            try:
                self._values[setting.name] = setting.read(environ)
            except SettingError as error:
                self._values[setting.name], self.error = setting.default, error

    def __getitem__(self, setting: Setting[T]) -> T:
        value: T = self._values[setting.name]
        return value


def misspelt(environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the unknown ``MPISTRAT_…`` variables, each with the nearest known name or an empty string."""
    known = [setting.name for setting in SETTINGS]
    names = sorted(name for name in (os.environ if environ is None else environ) if name.upper().startswith(_PREFIX))
    unknown = [name for name in names if name not in (*known, *_INTERNAL)]
    if not unknown:
        return {}
    import difflib

    wanted = [name.removeprefix(_PREFIX) for name in known]
    near = {name: difflib.get_close_matches(name[len(_PREFIX) :].upper(), wanted, 1) for name in unknown}
    return {name: "".join(_PREFIX + match for match in matches) for name, matches in near.items()}


def misspelt_text(name: str, near: str) -> str:
    """Return the warning about an unknown variable; `near` is the name that `misspelt` suggests for it."""
    return f"{name} is set, but is not a setting of mpistrat" + (f"; did you mean {near}?" if near else "")


def parse_bytes(text: str) -> int:
    """Return the bytes of a text such as ``64MiB``, ``1.5 KiB``, ``8`` or ``1GB``; raise InvalidArgumentError for others."""
    compact = text.replace(" ", "")
    digits = compact.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ")
    unit = compact[len(digits) :].upper()
    try:
        amount = float(digits) * _UNITS[unit]
        count = int(amount)
    except (ValueError, KeyError, OverflowError):
        accepted = "a number and B, KiB, MiB, GiB, KB, MB or GB are accepted, for example 64MiB"
        raise InvalidArgumentError(f"{text!r} is not a size: {accepted}") from None
    if count < 0 or count != amount:
        raise InvalidArgumentError(f"{text!r} is not a whole, non-negative number of bytes")
    return count


def _parse_some_bytes(text: str) -> int:
    count = parse_bytes(text)
    if not count:
        raise ValueError("at least 1 byte is accepted")
    return count


def parse_duration(text: str) -> float:
    """Return the seconds of a text such as ``90``, ``10m``, ``1.5h``, or, as SLURM writes it, ``2:00:00`` or ``1-12:00:00``."""
    compact = text.strip()
    days, dash, clock = compact.rpartition("-")
    try:
        if unit := _SECONDS.get(compact[-1:]):
            total = unit * _parse_seconds(compact[:-1])
        else:
            of_days, *rest = map(_parse_seconds, [days if dash else "0", *clock.split(":")])
            # D-HH, D-HH:MM and D-HH:MM:SS begin with hours, others end with seconds
            hours, minutes, seconds = [*rest, 0.0, 0.0][: max(3, len(rest))] if dash else [0.0] * (3 - len(rest)) + rest
            total = 86400 * of_days + 3600 * hours + 60 * minutes + seconds
        if not total <= _MOST_SECONDS:
            raise ValueError("no limit is no duration")
    except ValueError:
        accepted = "seconds, a number with s, m, h or d (10m), M:SS, H:MM:SS, D-HH and D-HH:MM:SS up to 9999d are accepted"
        raise InvalidArgumentError(f"{text!r} is not a duration: {accepted}") from None
    return total


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
    if not 0 <= seconds < math.inf:
        raise ValueError("a number of seconds >= 0 is accepted")
    return seconds


class _OneOf:
    def __init__(self, *words: str) -> None:
        self.words = words

    def __call__(self, text: str) -> str:
        if text.lower() not in self.words:
            raise ValueError(f"{', '.join(self.words)} are accepted")
        return text.lower()


VIRTUAL_NODES = setting("MPISTRAT_VIRTUAL_NODES", str, "")(
    "Treat the ranks as if they were placed on nodes of this shape: 2x2, 3+1, 2x2:cyclic. Empty: the real nodes."
)
DEVICE = setting("MPISTRAT_DEVICE", _OneOf("auto", "gpu", "cpu"), "auto")(
    "The device that ranks compute on: auto (a GPU if CuPy is installed and finds one), gpu (an error if there is none) or cpu "
    "(no GPU is looked for)."
)
ALLOW_SHARED_GPU = setting("MPISTRAT_ALLOW_SHARED_GPU", _parse_bool, False)("Let several ranks share one GPU, for tests.")
STRICT = setting("MPISTRAT_STRICT", _parse_bool, False, is_shared=True)(
    "Compare each call completely before its result is returned, instead of leaving part of the comparison to a later call."
)
ABORT = setting("MPISTRAT_ABORT", _parse_bool, True)("Abort the whole job when one rank has an uncaught exception.")
TRACEBACK = setting("MPISTRAT_TRACEBACK", _OneOf("short", "full"), "short")(
    "Whether the traceback of an uncaught exception in a job of several ranks shows the frames inside this library (full), or "
    "ends with the last line of the program (short)."
)
ALGORITHM = setting("MPISTRAT_ALGORITHM", _OneOf("auto", "flat", "hierarchical"), "auto", is_shared=True)(
    "The all-reduce algorithm of calls that do not name one; hierarchical cuts large buffers into chunks that overlap."
)
CHUNK_BYTES = setting("MPISTRAT_CHUNK_BYTES", parse_bytes, 0, is_shared=True)(
    "The chunk size of a hierarchical all-reduce. 0: chosen by the planner."
)
MAX_MESSAGE_BYTES = setting("MPISTRAT_MAX_MESSAGE_BYTES", _parse_some_bytes, 2**30, is_shared=True)(
    "The largest message passed to MPI in one call; larger ones are split."
)
INTRA_TRANSPORT = setting(
    "MPISTRAT_INTRA_TRANSPORT", _OneOf("auto", "shared_memory", "mpi", "nccl", "cuda_ipc", "staged"), "auto", is_shared=True
)(
    "The transport between ranks of one node: shared_memory or mpi for arrays in host memory; nccl, cuda_ipc, or staged "
    "(through host memory; mpi means the same) for arrays on GPUs."
)
INTER_TRANSPORT = setting(
    "MPISTRAT_INTER_TRANSPORT", _OneOf("auto", "mpi_ring", "mpi", "nccl", "cuda_aware"), "auto", is_shared=True
)(
    "The transport between nodes: mpi_ring or mpi, over which arrays on GPUs are staged through host memory; for arrays on "
    "GPUs nccl or cuda_aware, which auto takes in this order: NCCL where it has an adapter or a plugin, then a CUDA-aware MPI."
)
MPI_GPU = setting("MPISTRAT_MPI_GPU", _OneOf("auto", "on", "off"), "auto")(
    "Whether GPU memory is passed to MPI directly: on, off (staged through host memory) or auto (on if the MPI library is "
    "CUDA-aware, which each job tests once). Rank 0 reads it for all ranks."
)
PEER_MEMORY = setting("MPISTRAT_PEER_MEMORY", _parse_bool, True)(
    "Ranks of a node may read and write each other's arrays directly (cross-memory attach), if the kernel permits it."
)
TUNING = setting("MPISTRAT_TUNING", str, "auto")(
    "The measurements by which auto chooses algorithms: auto (the file that mpistrat tune wrote for this cluster and rank "
    "placement, if there is one), off (the built-in limits), or the path of such a file. Rank 0 reads it for all ranks."
)
TIMEOUT_SECONDS = setting("MPISTRAT_TIMEOUT_SECONDS", _parse_seconds, 0.0)(
    "Deadline in seconds of collectives that set none themselves. 0: none."
)
STALL_SECONDS = setting("MPISTRAT_STALL_SECONDS", _parse_seconds, 30.0)(
    "When a rank has waited this long in a collective, one rank prints which ranks are missing and what they are doing; again "
    "after twice the time. 0: never."
)
TIME_LIMIT = setting("MPISTRAT_TIME_LIMIT", parse_duration, 0.0)(
    "How long the job may run, restarts by `mpistrat run --max-restarts` included, from the first start of rank 0, which "
    "reads it: a number of seconds (SLURM's --time=90 is minutes), 90m, 1.5h, H:MM:SS or D-HH:MM:SS. "
    "`experimental.PreemptionCheckpointHandler` saves and stops in time. 0: as long as SLURM says, or for ever."
)
TIMELINE = setting("MPISTRAT_TIMELINE", str, "")(
    "A trace file, trace.json for example, with the timeline of every rank, which rank 0 writes at exit; open it at "
    "ui.perfetto.dev. Where no communicator or strategy is of all ranks, each writes one: rank 1 trace-1.json. Empty: none."
)
VERBOSE = setting("MPISTRAT_VERBOSE", _parse_bool, False)(
    "Rank 0 prints the nodes that it found, and each plan that is chosen and why."
)
