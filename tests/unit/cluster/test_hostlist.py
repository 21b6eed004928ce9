"""Host lists and task counts as SLURM writes them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.cluster.slurm import expand_hosts, expand_tasks
from mpistrat.errors import InvalidArgumentError


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n[009-011]", "n009 n010 n011"),
        ("a[1-2,5],b3", "a1 a2 a5 b3"),
        ("foo003,foo0[10-20]", "foo003 foo010 foo011 foo012 foo013 foo014 foo015 foo016 foo017 foo018 foo019 foo020"),
        ("b04-[09-10]", "b04-09 b04-10"),
        ("rack[0-1]n[1-2]", "rack0n1 rack0n2 rack1n1 rack1n2"),
        ("nodeA,nodeB[001,003],nodeC", "nodeA nodeB001 nodeB003 nodeC"),
        ("one", "one"),
        (" z2,a1 ", "z2 a1"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("n[99-101]-ib,login", "n99-ib n100-ib n101-ib login"),
        ("n[3,1-2]", "n3 n1 n2"),
        ("[1-2].example.org", "1.example.org 2.example.org"),
        ("r[0-1]c[0-1]n[01-02]", "r0c0n01 r0c0n02 r0c1n01 r0c1n02 r1c0n01 r1c0n02 r1c1n01 r1c1n02"),
    ],
)
def test_hosts_keep_their_order_and_their_zeros(text, hosts):
    assert expand_hosts(text) == hosts.split()


@pytest.mark.parametrize("text", ["", "  ", "a,,b", "a,", ",a", "n[1-2", "n1-2]", "n[1[2-3]]", "n[1-2]]", "a b"])
def test_a_text_that_is_not_a_host_list(text):
    with pytest.raises(InvalidArgumentError) as caught:
        expand_hosts(text)
    assert str(caught.value) == (
        f"{text!r} cannot be read: a name is empty, or brackets are not paired; a host list is NAME,NAME,…, where a name may "
        "hold ranges in brackets: n[009-011,20],rack[0-1]n[1-2]"
    )


@pytest.mark.parametrize(
    ("text", "part"), [("n[3-1]", "3-1"), ("n[]", ""), ("n[1,]", ""), ("n[1-]", "1-"), ("n[a-b]", "a-b"), ("n[1-2-3]", "1-2-3")]
)
def test_a_range_that_is_none(text, part):
    with pytest.raises(InvalidArgumentError) as caught:
        expand_hosts(text)
    assert str(caught.value).startswith(
        f"{text!r} holds the range {part!r}, which is neither NUMBER nor LOW-HIGH; a host list is"
    )


@given(st.lists(st.tuples(st.from_regex(r"[a-z]{1,4}", fullmatch=True), st.integers(0, 120), st.integers(0, 4))))
def test_expanding_gives_what_was_compressed(groups):
    text = ",".join(f"{name}[{first:03}-{first + more:03}]" for name, first, more in groups) or "x"
    hosts = [f"{name}{number:03}" for name, first, more in groups for number in range(first, first + more + 1)] or ["x"]
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize(
    ("text", "counts"), [("3(x2),2,1", [3, 3, 2, 1]), ("4", [4]), ("2(x3)", [2, 2, 2]), ("1,2(x1)", [1, 2]), ("0,1", [0, 1])]
)
def test_task_counts(text, counts):
    assert expand_tasks(text) == counts


@pytest.mark.parametrize(
    ("text", "part"), [("", ""), ("3,", ""), ("3(2)", "3(2)"), ("x2", "x2"), ("3(x2", "3(x2"), ("-1", "-1")]
)
def test_a_text_that_counts_no_tasks(text, part):
    with pytest.raises(InvalidArgumentError) as caught:
        expand_tasks(text)
    assert str(caught.value) == (
        f"{text!r} holds {part!r}; a list of task counts is COUNT or COUNT(xNODES), joined by commas: 3(x2),2,1"
    )
