"""What is said to be here as in tf.distribute is, with TensorFlow's arguments; what is said to be absent is."""

import inspect
import re

import pytest

from tests.docs.surface import resolve
from tests.docs.tf_names import ABSENT, DIFFERENT, SAME

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
HERE = [*SAME, *(name for _, names in DIFFERENT for name in names)]
GONE = [name for _, names in ABSENT for name in names]


def spelled(name):
    return name.spelling


@pytest.mark.parametrize("name", HERE, ids=spelled)
def test_what_is_said_to_be_here_is_and_takes_the_same_arguments(name):
    found = resolve(name.path)
    if not name.arguments:
        return
    parameters = inspect.signature(found).parameters
    taken = [argument.lstrip("*") for argument in name.arguments]
    explained = set(re.findall(r"`\*?(\w+)`", name.remark))
    missing = [argument for argument in taken if argument not in parameters and argument not in explained]
    assert missing == [], f"{name.path} takes {', '.join(parameters)}"
    empty = inspect.Parameter.empty
    required = [key for key, parameter in parameters.items() if parameter.default is empty and parameter.kind in _NAMED]
    added = [key for key in required if key not in taken and key not in explained and key != "self"]
    assert added == [], "required here, and unknown to a program for TensorFlow"
    shared = [argument for argument in taken if argument in parameters]
    assert [key for key in parameters if key in shared] == shared, "in another order"


@pytest.mark.parametrize("name", [name for name in GONE if not name.path.rpartition(".")[2].startswith("_")], ids=spelled)
def test_what_is_said_to_be_absent_is(name):
    with pytest.raises(AttributeError):
        resolve(name.path)


@pytest.mark.parametrize("name", [name for name in (*HERE, *GONE) if name.remark], ids=spelled)
def test_what_differs_is_explained_in_one_sentence(name):
    assert re.fullmatch(r"[^.].*\.", name.remark), name.remark
