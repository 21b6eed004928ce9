"""A plugin of pytest: the tests of mpi4py send and receive arrays of NumPy and of Python's ``array``, and no others.

With ``-p tests.interop.host_arrays``. There is no CuPy for them, as when mpi4py runs them itself. Of the other kinds, some say
that they are in memory of a GPU and are not, which this library refuses; some give DLPack capsules that end before what they
describe, which crashes NumPy.
"""

import sys

sys.modules["cupy"] = None  # type: ignore[assignment]


def pytest_collection_finish() -> None:
    """Leave out the other kinds of arrays, which the tests go through when they run."""
    kinds = sys.modules["arrayimpl"].ArrayBackends
    kinds[:] = [kind for kind in kinds if kind.__name__ in ("ArrayArray", "ArrayNumPy")]
