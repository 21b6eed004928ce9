"""What the ``ranks`` mark accepts."""

import pytest

from mpistrat.pytest.plugin import Shape, shapes_of


@pytest.mark.parametrize(
    ("arguments", "keywords", "shapes"),
    [
        ((2,), {}, [Shape(2)]),
        ((2, 4), {"nodes": "2x2"}, [Shape(2), Shape(4), Shape(4, "2x2")]),
        ((), {"nodes": ["3+1", "2x2:cyclic"]}, [Shape(4, "3+1"), Shape(4, "2x2:cyclic")]),
    ],
)
def test_numbers_and_node_shapes_are_shapes(arguments, keywords, shapes):
    assert shapes_of(pytest.mark.ranks(*arguments, **keywords).mark) == shapes


@pytest.mark.parametrize(
    ("arguments", "keywords", "named"),
    [
        ((), {}, "numbers of ranks"),
        ((0,), {}, "0 is not a number of ranks"),
        ((True,), {}, "True is not a number of ranks"),
        (("2",), {}, "'2' is not a number of ranks"),
        ((2**30,), {}, "1073741824 is not a number of ranks"),
        ((2,), {"shape": "2x2"}, "shape='2x2'"),
        ((2,), {"nodes": 3}, "nodes=3"),
        ((), {"nodes": "2y2"}, "2y2"),
    ],
)
def test_a_malformed_mark_is_refused_with_what_is_accepted(arguments, keywords, named):
    with pytest.raises(ValueError, match="accepted|expected|shape") as caught:
        shapes_of(pytest.mark.ranks.with_args(*arguments, **keywords).mark)
    assert named in str(caught.value)


def test_a_test_is_named_after_its_shape():
    assert [str(shape) for shape in (Shape(2), Shape(4, "2x2"))] == ["2-ranks", "2x2"]
