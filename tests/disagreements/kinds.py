"""The kinds of disagreement: sequences of calls, each with every deviation that fits it; and which cases there are."""

import random
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, pairwise, zip_longest
from typing import Any

from tests.disagreements.calls import ITSELF, VERBS, Call
from tests.disagreements.case import Plan
from tests.disagreements.deviations import (
    ARGUMENTS,
    DRAWN,
    ORDERS,
    REPORTED,
    RIGHT,
    TOLD,
    TOLD_OR_REPORTED,
    Calls,
    Deviation,
    change,
    insert,
    outcomes,
)

SHAPES = ("1x2", "2x2", "1x4", "3+1")
SIZES = (1, 10, 20_000, 300_000)
LARGE = (*SIZES, 4_000_000)
FEW = (10, 300_000)


@dataclass(frozen=True)
class Kind:
    """One way to disagree, with arrays of some number of elements."""

    name: str
    usual: Calls
    odd: Calls  # what odd ranks call instead
    sizes: tuple[int, ...] = SIZES  # numbers of elements it is tried with
    allowed: frozenset[str] | None = None  # how a case may end, where it does not follow from the calls
    alone: bool = False  # whether the program ends in it: each case has a job of its own
    warm: str = "usual"  # what all ranks do before in a warm case: the ``usual`` calls, ``both``, or an ``other`` one
    says: str = r"AgreementError|UnavailableError|DeadlineExceededError"  # must be on stderr where the program ends in it

    @property
    def outcomes(self) -> frozenset[str]:
        return self.allowed or outcomes(self.usual, self.odd)

    @property
    def place(self) -> str:
        """A pattern of what a report must say of a rank that does not come: in which function it is, if it can say that."""
        if self.allowed != REPORTED:
            return ""
        verb = self.odd[-1].verb
        return "stopped|does not answer" if verb == "stop" else rf"\({VERBS[verb].__name__}\)"

    @property
    def difference(self) -> str:
        """Where the calls of both sides begin to differ."""
        pairs = enumerate(zip_longest(self.usual, self.odd, fillvalue="no more call"))
        return next((f"call {index}: {one}; {other}" for index, (one, other) in pairs if one != other), "no difference")


@cache
def table(n: int) -> dict[str, Kind]:
    """Return all kinds, with arrays of so many elements, by their names."""
    kinds = (*_arguments(n), *_nests(n), *_options(n), *_verbs(n), *_sequences(n), *_absent(n))
    drawn = (Kind(name, [], [], sizes=(), warm=warm) for name, (_, warm) in DRAWN.items())
    return {kind.name: kind for kind in (*kinds, *drawn)}


def kind_of(plan: Plan, ranks: int) -> Kind:
    """Return the kind of a case, with what its ranks call."""
    if plan.kind in DRAWN:
        draw, warm = DRAWN[plan.kind]
        return Kind(plan.kind, *draw(plan, ranks), warm=warm)
    return table(plan.count)[plan.kind]


def _reduce(n: int, more: int = 0, **arguments: Any) -> Call:
    return Call("all_reduce", (n + more,), **arguments)


def _arguments(n: int) -> Iterator[Kind]:
    """Yield calls of which one argument differs."""
    calls: dict[str, tuple[Call, str]] = {
        "all_reduce": (_reduce(n), "shape dtype op layout thread"),
        "float32": (_reduce(n, dtype="float32"), "shape dtype op"),
        "float16": (_reduce(n, dtype="float16"), "dtype"),
        "float32_max": (_reduce(n, dtype="float32", op="max"), "op"),
        "int8_max": (_reduce(n, dtype="int8", op="max"), "dtype op"),
        "deterministic": (_reduce(n, dtype="float32", options={"deterministic": True}), "shape"),
        "deadline": (_reduce(n, options={"timeout_seconds": 5.0}), "shape"),
        "hierarchical": (_reduce(n, options={"algorithm": "hierarchical"}), "shape"),
        "started": (Call("started", (n,)), "shape dtype op"),
        "into": (Call("into", (n,)), "shape dtype op"),
        "merge_call": (Call("merge_call", (n,)), "shape dtype"),
        "two_axes": (Call("all_reduce", (2, max(n // 2, 1))), "shape"),
        "slices": (Call("all_reduce", (n, 2), form="slices"), "shape"),
        "reduce": (Call("reduce", (n, 2)), "shape dtype op place"),
        "all_gather": (Call("all_gather", (n, 2), dtype="float32", place=0), "shape dtype place"),
        "all_gather_of_one_axis": (Call("all_gather", (n,), place=0), "shape"),
        "all_gather_of_a_square": (Call("all_gather", (max(int(n**0.5), 1),) * 2, place=0), "place"),
        "gather": (Call("gather", (n, 2), place=0), "shape dtype place"),
        "broadcast": (Call("broadcast", (n,), place=0), "shape dtype place"),
        "reduce_scatter": (Call("reduce_scatter", (2 * n, 8), place=0), "shape dtype op place"),
        "reduce_scatter_of_one_axis": (Call("reduce_scatter", (n,), place=0), "shape"),
        "all_to_all": (Call("all_to_all", (n,), dtype="float32", place=0), "shape dtype place"),
        "variable": (Call("variable", (n,), op="none"), "shape dtype"),
    }
    sizes = dict.fromkeys(("all_reduce", "into", "started", "all_gather", "reduce_scatter"), SIZES) | {"float32": LARGE}
    for name, (call, arguments) in calls.items():
        for argument in arguments.split():
            for deviation, deviate in ARGUMENTS[argument].items():
                if deviate([call]) != [call]:
                    yield Kind(f"{name}.{deviation}", [call], deviate([call]), sizes.get(name, FEW))
    yield Kind("one_element.no_axes", [_reduce(1)], [Call("all_reduce")], (1,))
    yield Kind("no_axes.python_number", [Call("all_reduce")], [Call("all_reduce", layout="number")], (1,))


def _nests(n: int) -> Iterator[Kind]:
    """Yield calls with another nest of arrays."""
    pairs = {
        "array": "one two dict leaf_missing thirty",
        "dict": "list leaf_missing leaf_none two",
        "two": "one deeper keys short_and_long",
        "keys": "keys_renamed",
        "short_and_long": "long_and_short",
        "cut": "cut_elsewhere",
        "five": "thirty",
        "thirty": "thirty_one_longer thirty_one_int32",
    }
    for form, others in pairs.items():
        for other in others.split():
            yield Kind(f"{form}.{other}", [_reduce(n, form=form)], [_reduce(n, form=other)])
    dense, slices, more = (Call("all_reduce", (n, 2), form=form) for form in ("array", "slices", "slices_of_more_rows"))
    yield Kind("array.slices", [dense], [slices])
    yield Kind("slices.slices_of_more_rows", [slices], [more])


def _options(n: int) -> Iterator[Kind]:
    """Yield calls with other options: all with those that have none, and some with each other."""
    options: dict[str, dict[str, Any]] = {
        "no_options": {},
        "flat": {"algorithm": "flat"},
        "hierarchical": {"algorithm": "hierarchical"},
        "float16": {"algorithm": "hierarchical", "wire_dtype": "float16"},
        "bfloat16": {"algorithm": "hierarchical", "wire_dtype": "bfloat16"},
        "packs_of_1MiB": {"bytes_per_pack": 1 << 20},
        "packs_of_4KiB": {"bytes_per_pack": 4096},
        "deterministic": {"deterministic": True},
        "deadline": {"timeout_seconds": 5.0},
    }
    of_scatter = ("no_options", "flat", "hierarchical", "deterministic", "deadline")
    for verb, dtype, names in (("all_reduce", "float32", tuple(options)), ("reduce_scatter", "float64", of_scatter)):
        for one, other in dict.fromkeys((*pairwise(names), *((names[0], name) for name in names[1:]))):
            form = "five" if "packs" in one else "array"
            usual, odd = (Call(verb, (n,), dtype=dtype, form=form, options=options[name]) for name in (one, other))
            yield Kind(f"{verb}.{one}.{other}", [usual], [odd])


def _simple(n: int) -> dict[str, Call]:
    with_place = ("all_gather", "gather", "broadcast", "reduce_scatter")
    names = ("all_reduce", "started", "reduce", "all_to_all", "variable", *with_place)
    return {name: Call(name, (n,), place=0 if name in with_place else None) for name in names} | {"barrier": Call("barrier")}


def _verbs(n: int) -> Iterator[Kind]:
    """Yield two calls of different verbs."""
    for (name, usual), (other, odd) in combinations(_simple(n).items(), 2):
        yield Kind(f"{name}.{other}", [usual], [odd], SIZES if name == "all_reduce" else FEW, warm="both")
    for other in ("into", "of_communicator"):
        yield Kind(f"all_reduce.{other}", [_reduce(n)], [Call(other, (n,))], LARGE, warm="both")
    yield Kind("all_reduce.broadcast_from_itself", [_reduce(n)], [Call("broadcast", (n,), place=ITSELF)], warm="both")
    yield Kind("all_reduce.close", [_reduce(n)], [Call("close")], FEW, warm="other")
    yield Kind("maximum.merge_call", [_reduce(n, op="max")], [Call("merge_call", (n,))], FEW, warm="both")
    yield Kind("mean.weighted", [_reduce(n, op="mean")], [Call("weighted", (n,), op="mean")], warm="both")


def _sequences(n: int) -> Iterator[Kind]:
    """Yield calls in another order, one less, one more, or one that differs; and calls that concern one rank alone."""
    one, other, last, simple = _reduce(n), _reduce(n, 2, op="max"), Call("all_reduce", (5,), dtype="float32"), _simple(n)
    variable, barrier, strategy = simple["variable"], simple["barrier"], Call("strategy")
    by_second = _reduce(n, form="two", strategy=1)
    sequences: dict[str, Calls] = {
        "three": [one, other, last],
        "five_equal": [one] * 5,
        "verbs": [simple[verb] for verb in ("all_gather", "reduce_scatter", "broadcast", "reduce", "all_to_all")],
        "barrier_between": [one, barrier, last],
        "barriers": [barrier] * 3,
        "starts": [Call("start", (n,)), Call("start", (n + 2,)), Call("wait")],
        "threads": [one, replace(one, is_on_thread=True)],
        "variables": [variable, Call("variable", (n + 2,)), one],
        "assigned": [variable, variable, Call("assign", place=0), one],
        "read": [Call("variable", (n,), form="on_read"), Call("read"), one],
        "strategy": [strategy, one],
        "strategies": [strategy, by_second, one],
        "closed": [strategy, by_second, Call("close", strategy=1), one],
    }
    deviations: list[tuple[str, str, Deviation]] = [
        *((name, f"{what}_{index}", way(index)) for what, way in ORDERS.items() for name in sequences for index in range(5)),
        *((name, "nothing", insert(0)) for name in ("three", "verbs", "threads")),
        ("three", "late", insert(0, Call("late"))),
        ("three", "merge_nothing", insert(0, Call("merge_nothing"))),
        ("starts", "longer", ARGUMENTS["shape"]["longer"]),
        ("starts", "waited_backwards", change(2, place=1)),
        ("variables", "dtype", change(dtype="int64")),
        ("assigned", "other", change(2, place=1)),
        ("assigned", "added", change(2, verb="assign_add")),
        ("assigned", "mean", change(op="mean")),
        ("strategy", "mirrored", change(verb="mirrored")),
        ("strategy", "options", change(options={"bytes_per_pack": 4096})),
        ("strategies", "packs", change(options={"num_packs": 3})),
        ("strategies", "explain", insert(2, Call("explain"))),
        ("strategies", "drop", insert(2, Call("drop"))),
    ]
    how: dict[str, dict[str, Any]] = {
        "read": {"warm": "both"},
        "strategy": {"sizes": FEW, "warm": "other"},
        "strategies": {"sizes": (10,), "warm": "other"},
        "closed": {"sizes": (10,), "warm": "other"},
        "closed.twice_2": {"sizes": (10,), "warm": "other", "allowed": RIGHT},  # a strategy may be closed again
    }
    found: list[tuple[str, Calls]] = []
    for name, deviation, deviate in deviations:
        usual, odd = sequences[name], deviate(sequences[name])
        # a variable or strategy must have been made before it is used
        is_possible = name not in ("read", "strategies", "closed") or odd[0].verb == usual[0].verb
        if deviation == "nothing" or (is_possible and odd != usual and (name, odd) not in found):
            found.append((name, odd))
            yield Kind(f"{name}.{deviation}", usual, odd, **how.get(f"{name}.{deviation}", how.get(name, {})))


def _absent(n: int) -> Iterator[Kind]:
    """Yield ranks that do not come, or come late, and those whose program ends."""
    one: Calls = [_reduce(n)]
    for name, call in {**_simple(n), "strategy": Call("strategy"), "close": Call("close")}.items():
        sizes = FEW if name == "all_reduce" else (10,)
        yield Kind(f"{name}.sleep", [call], [Call("sleep")], sizes, REPORTED, warm="other")
    yield Kind("of_two.sleep", [Call("pair"), Call("of_two")], [Call("pair"), Call("sleep")], (10,), REPORTED, warm="other")
    for verb in ("compute", "pipe", "lock", "barrier_of_mpi"):
        yield Kind(f"all_reduce.{verb}", one, [Call(verb)], FEW, REPORTED, warm="other")
    yield Kind("late.interrupted", [Call("late"), *one], [Call("interrupted", (n,)), *one], FEW, TOLD, warm="other")
    feed = Call("feed", (6,))
    yield Kind("feed.ends_early", [feed], [Call("feed", (4,))], (10,), warm="other")
    yield Kind("feed.sleeps", [feed], [Call("feed", (6,), place=3, form="sleeps")], (10,), REPORTED, warm="other")
    end = {"alone": True, "warm": "other"}
    yield Kind("feed.raises", [feed], [Call("feed", (6,), place=3)], (10,), says=r"(?i)no such file of rows", **end)
    yield Kind("all_reduce.stop", one, [Call("stop")], FEW, REPORTED, **end)  # it can answer nobody
    yield Kind("all_reduce.raise", one, [Call("raise")], FEW, says=r"(?i)a rank fails here", **end)
    yield Kind("all_reduce.end", one, [], FEW, TOLD_OR_REPORTED, says=r"(?is)(rank \d+).*(end|gone|exit|left)", **end)
    for verb in ("exit", "vanish"):
        yield Kind(f"all_reduce.{verb}", one, [Call(verb)], (10,), TOLD_OR_REPORTED, says=r"exit:[1-9]", **end)
    yield Kind("all_reduce.longer_and_end", one, [_reduce(n, max(1, n // 5))], FEW, **end)
    yield Kind("start.longer_and_end", [Call("start", (n,))], [Call("start", (n + max(1, n // 5),))], FEW, **end)
    yield Kind("three_equal.twice_and_end", one * 3, one * 4, FEW, **end)


KINDS = table(10)


def plan_of(kind: Kind, count: int, warm: bool, ranks: int, seed: int = 0) -> Plan:
    """Return a case; who is odd is always the same: a rank, all others, or half of them, unless a rank may not come."""
    number = zlib.crc32(f"{kind.name} {count} {seed}".encode()) + warm
    one = number % ranks
    plan = Plan(kind.name, count, warm, (one,), seed)
    if kind.alone or "reported" in kind_of(plan, ranks).outcomes:
        return plan
    others, half = tuple(rank for rank in range(ranks) if rank != one), tuple(range(ranks // 2))
    return Plan(kind.name, count, warm, ((one,), (one,), others, half)[number // ranks % 4], seed)


def all_plans(ranks: int, names: Collection[str] = KINDS) -> Iterator[Plan]:
    for kind in map(KINDS.__getitem__, names):
        for count in kind.sizes:
            for warm in (False, True):
                yield plan_of(kind, count, warm, ranks)


def quick_plans(ranks: int, names: Collection[str] = KINDS, share: float = 1.0) -> list[Plan]:
    """Return one small and one large case of each kind, one first and one warm; of a share of all, always the same."""
    plans = []
    for kind in map(KINDS.__getitem__, names):
        draw_ = random.Random(f"{kind.name} {ranks}")
        if not kind.sizes or draw_.random() >= share:
            continue
        small, large = (draw_.choice(sizes) for sizes in (kind.sizes[:2], kind.sizes[-3:]))
        warm = draw_.random() < 0.5
        plans.append(plan_of(kind, small, warm, ranks))
        if large not in (small, 4_000_000):
            plans.append(plan_of(kind, large, not warm, ranks))
    return plans


def drawn_plans(name: str, ranks: int, count: int, most: int, first_seed: int = 1) -> Iterator[Plan]:
    """Yield so many cases of a kind that draws what it does; each a few elements or up to `most`."""
    for seed in range(first_seed, first_seed + count):
        draw_ = random.Random(seed)
        yield plan_of(KINDS[name], draw_.choice((10, 1000, 20_000, most)), draw_.random() < 0.5, ranks, seed)
