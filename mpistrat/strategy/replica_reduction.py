"""ReplicaReduction: how a replica combines its values with those of the others."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.arrays import like
from mpistrat.communicator.options import CommunicationOptions, check_options
from mpistrat.errors import InvalidArgumentError, UnsupportedDtypeError
from mpistrat.execution.work import Work
from mpistrat.groups.agreement import word_of
from mpistrat.reduction import ReduceOp, check_meaning
from mpistrat.strategy.deprecated import hinted
from mpistrat.strategy.replica_exchange import ReplicaExchange, read_leaves
from mpistrat.strategy.weighting import weighted_part
from mpistrat.structures import ONE_LEAF, OUTLINES_KEPT, Structure, flatten, flatten_arrays, leaf_names, rebuild

__all__ = ["ReplicaReduction"]

_FRAMES = 3  # between the communicator and the program


class ReplicaReduction(ReplicaExchange):
    """The collective calls of a replica context that combine arrays."""

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        *,
        weight: Any = None,
        experimental_hints: CommunicationOptions | None = None,
    ) -> Any:
        """Combine a value across replicas; every replica receives the result.

        A collective call: every replica makes it, with the same structure, shapes and dtypes.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM, MEAN, MIN, MAX or PROD, in any case.
        value : nest of array_like or IndexedSlices
            The leaves are reduced together, as one batch.
        options : CommunicationOptions, optional
            Merged over those of the strategy.
        weight : float, optional
            With MEAN, of floats or complex numbers: how much this replica counts, for example the number of its examples. The
            result is the sum of ``weight * value`` over all replicas, divided by the sum of the weights: NaN where they are
            all 0. A replica with weight 0 contributes nothing, even NaN. Not in TensorFlow.
        experimental_hints : CommunicationOptions, optional
            The old name of `options`; deprecated.

        Returns
        -------
        nest of array
            New arrays of the shapes and dtypes passed, in the same structure.

        Raises
        ------
        RuntimeError
            If this replica context is not the current one.
        TypeError
            If `reduce_op` is neither ReduceOp nor str.
        InvalidArgumentError
            If the operation is unknown, `options` are of another type, or `weight` is negative, no number, out of the range of
            a leaf's dtype, or passed with another operation than MEAN.
        UnsupportedDtypeError
            If a leaf is not an array, or the operation is not defined for its dtype, as the sum of booleans.
        NotImplementedError
            If slices are to be combined otherwise than by SUM or MEAN without weight.
        AgreementError
            On every replica, if replicas pass different structures, shapes, dtypes or operations. Where MPI combines the arrays
            between nodes one of the next calls raises it, and this one if MPISTRAT_STRICT is on.
        """
        self._require_current("all_reduce")
        if options is None and weight is None and experimental_hints is None:
            again = self._again(reduce_op, value)
            if again is not None:
                return again
        leaves, structure = flatten(value)
        if experimental_hints is not None:
            options = hinted(options, experimental_hints)
        try:
            if options is not None:
                check_options(options)
            op = ReduceOp.parse(reduce_op)
            arrays = read_leaves(value, leaves)
            if weight is not None:
                sent, finish = weighted_part(op, arrays, weight)
        except Exception as error:  # whatever the user's arrays raise when they are read, the other replicas must learn of it
            self._ops.refuse("all_reduce", error, options)
        call = _call(op, structure) if weight is None else f"all_reduce({op.name}, weighted) of {structure}"
        self._ops.note(call, options)
        if weight is not None:
            results = finish(self._extended.all_reduce(ReduceOp.SUM, sent, options))
        else:
            try:
                results = self._extended.all_reduce(op, arrays, options)
            except UnsupportedDtypeError:
                _check_dtypes(op, value, arrays)
                raise
        return rebuild(structure, list(map(like, results, leaves)))

    def _again(self, reduce_op: ReduceOp | str, value: Any) -> Any:
        """Combine a nest of arrays like an earlier one, in little time. None, and nothing done, where all must be looked at."""
        if not self._is_quick:
            return None
        try:
            op, word = _of_one_array.get(reduce_op) or _parsed(reduce_op)
        except (TypeError, InvalidArgumentError):
            return None  # the other replicas must learn of it
        if type(value) is np.ndarray:
            results = self._ops.all_reduce_again(op, (value,), word, _FRAMES)
            return None if results is None else results[0]
        nest = flatten_arrays(value)
        if nest is None:
            return None
        leaves, structure = nest
        results = self._ops.all_reduce_again(op, leaves, _noted(op, structure), _FRAMES)
        return None if results is None else rebuild(structure, results)

    def start_all_reduce(self, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Work[Any]:
        """Start what `all_reduce` does, and return its handle. Not in TensorFlow.

        A collective call. What was started goes on while the program computes: one operation after the other, in the order
        of the calls, which must be the same on all replicas. Any number may be under way; another collective of the strategy
        begins when they have ended. Until ``handle.wait()`` has returned, the arrays of `value` must not be changed. A deadline
        counts from when the turn of the operation comes.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            SUM, MEAN, MIN, MAX or PROD, in any case.
        value : nest of array_like or IndexedSlices
            As for `all_reduce`, which says what is raised too.
        options : CommunicationOptions, optional
            Merged over those of the strategy.

        Returns
        -------
        Work
            ``done()`` asks whether it has ended; ``wait()`` returns what `all_reduce` would. Both raise what made it fail.
        """
        self._require_current("start_all_reduce")
        leaves, structure = flatten(value)
        try:
            check_options(options)
            op = ReduceOp.parse(reduce_op)
            arrays = read_leaves(value, leaves)
            _check_dtypes(op, value, arrays)
        except Exception as error:  # as in `all_reduce`
            self._ops.refuse("start_all_reduce", error, options)
        work = self._extended.start_all_reduce(op, arrays, options, structure)
        return work.then(lambda results: rebuild(structure, list(map(like, results, leaves))))


def _call(op: ReduceOp, structure: Structure) -> str:
    return f"all_reduce({op.name}) of {structure}"


def _noted(op: ReduceOp, structure: Structure) -> int:
    """Return the word of such a call, found once for each object that is a structure."""
    key = op._value_, id(structure)
    found = _words.get(key)
    if found is None or found[1] is not structure:
        if len(_words) >= OUTLINES_KEPT:
            _words.clear()
        found = _words[key] = word_of(_call(op, structure)), structure
    return found[0]


def _parsed(reduce_op: ReduceOp | str) -> tuple[ReduceOp, int]:
    """Return the operation, and the word of a call that combines one array so, found once for each spelling."""
    op = ReduceOp.parse(reduce_op)
    return _of_one_array.setdefault(reduce_op, (op, word_of(_call(op, ONE_LEAF))))


_of_one_array: dict[ReduceOp | str, tuple[ReduceOp, int]] = {}
_words: dict[tuple[str, int], tuple[int, Structure]] = {}


def _check_dtypes(op: ReduceOp, value: Any, arrays: list[Any]) -> None:
    """Check that it is clear what `op` makes of each leaf of a value, and say of which it is not."""
    for name, array in zip(leaf_names(value), arrays, strict=True):
        check_meaning(op, array.dtype, name)
