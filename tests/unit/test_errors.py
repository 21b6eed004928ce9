"""The exceptions: each is what a caller would expect to catch."""

from mpistrat import errors

BUILT_IN = (OSError, RuntimeError, StopIteration, TimeoutError, TypeError, ValueError)


def test_every_error_is_listed():
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert sorted(kind.__name__ for kind in kinds) == errors.__all__ == sorted(errors.__all__)
    for kind in kinds:  # a program catches what it would without this library
        assert kind.__doc__
        assert issubclass(kind, errors.MpistratError)
        assert str(kind("rank 5: found this, do that")) == "rank 5: found this, do that"
        assert kind("").raised_everywhere is (kind.__name__ in ("AgreementError", "CheckpointError"))
        assert kind in (errors.MpistratError, errors.CollectiveError) or issubclass(kind, BUILT_IN), kind
