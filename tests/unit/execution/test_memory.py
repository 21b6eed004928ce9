"""What a memory report says."""

from __future__ import annotations

import pytest

import mpistrat
from mpistrat.execution.memory import MemoryReport


def test_a_report_adds_up_and_is_one_line() -> None:
    report = MemoryReport(3, 8 << 20, 1 << 20, 1 << 20, 2, 4 << 20)
    assert (report.total_bytes, report.ratio) == (10 << 20, 2.5)
    assert str(report) == (
        "rank 3 holds 10 MiB: window 8 MiB, rails 1 MiB, plans 1 MiB (2 plans); 2.5 times its largest pack of 4 MiB"
    )
    with pytest.raises(AttributeError):
        report.rank = 4  # type: ignore[misc]


def test_one_replica_holds_nothing() -> None:
    strategy = mpistrat.OneDeviceStrategy()
    report = strategy.memory_report()
    assert (report.total_bytes, report.ratio, report.rank) == (0, 0.0, 0)
    strategy.close()
    with pytest.raises(RuntimeError, match="this strategy was closed"):
        strategy.memory_report()
