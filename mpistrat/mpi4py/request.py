"""WorkRequest: a started collective as a request of mpi4py."""

from __future__ import annotations

from typing import Any, Literal

from mpi4py import MPI

from mpistrat.execution.work import Work


class WorkRequest(MPI.Grequest):
    """A generalized request of MPI that is complete when a `Work` has ended.

    ``MPI.Request.Waitall`` and its like take it with other requests; they report a failure as an error of MPI, while `Wait` and
    `Test` raise what made it fail.
    """

    _work: Work[Any]

    @classmethod
    def of(cls, work: Work[Any]) -> WorkRequest:
        """Return the request of what has been started."""

        def query(_: MPI.Status) -> None:
            work.done()  # raises what made it fail, which mpi4py turns into an error of MPI

        started = MPI.Grequest.Start(query, _nothing, _nothing)
        request = cls(started)
        request._work = work
        work.add_done_callback(started.Complete)
        return request

    def Wait(self, status: MPI.Status | None = None) -> Literal[True]:  # noqa: N802 - MPI's name
        """Wait for the end.

        Raises
        ------
        AgreementError, DeadlineExceededError, UnavailableError
            As ``Work.wait``.
        """
        self._work.wait()
        return super().Wait(status)

    def Test(self, status: MPI.Status | None = None) -> bool:  # noqa: N802
        """Return whether it has ended; raises as `Wait`."""
        return self._work.done() and super().Test(status)

    def wait(self, status: MPI.Status | None = None) -> Any:
        """Wait for the end, and return None, as mpi4py does where nothing was pickled."""
        self.Wait(status)

    def test(self, status: MPI.Status | None = None) -> tuple[bool, Any]:
        """Return whether it has ended, and None."""
        return self.Test(status), None


def _nothing(*_: object) -> None:
    """Free or cancel nothing: what was started goes on."""
