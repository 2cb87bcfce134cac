"""Every printed form of replica groups, and what is wrong with some."""

from __future__ import annotations

import re

import pytest

from syncopate_jax.errors import FormatError
from syncopate_jax.importers import hlo_text
from syncopate_jax.importers.replica_groups import (
    AxisRef,
    Groups,
    fault,
    global_groups,
    make_mesh,
    read_groups,
)
from syncopate_jax.importers.scanner import Cursor


def groups(text: str) -> Groups:
    cursor = Cursor(hlo_text.LANGUAGE, text)
    found = read_groups(cursor)
    assert cursor.token.kind == "end"
    return found


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("{{0,2}, {1,3}}", ((0, 2), (1, 3))),
        ("{}", ()),
        ("[1,4]<=[4]", ((0, 1, 2, 3),)),
        ("[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[2,4]<=[2,2,2]T(1,0,2)", ((0, 1, 4, 5), (2, 3, 6, 7))),
        ("mesh['d'=2,'t'=4] {'t'}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['d'=2,'t'=4] {'d'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh[d=2,t=4] {t}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['d'=2,'t'=2] {'d','t'}", ((0, 1, 2, 3),)),
        ("mesh['d'=2,'t'=2] {'t','d'}", ((0, 2, 1, 3),)),
        ("mesh['d'=2,'t'=2], device_ids=(0,2,1,3) {'t'}", ((0, 2), (1, 3))),
        ("mesh['d'=2,'t'=4], device_ids=([4,2]T(1,0)) {'t'}", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("mesh['t'=8] {'t':(1)2}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("mesh['t'=8] {'t':(2)4}", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("mesh['t'=8] {'t':(2)2}", ((0, 2), (1, 3), (4, 6), (5, 7))),
    ],
)
def test_printed_forms(text: str, wanted: Groups) -> None:
    assert groups(text) == wanted


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{0,1}", "line 1, column 7: found the end of the file, needs ','"),
        ("{{0;1}}", "column 4: found ';', needs ','"),
        ("{{0,a}}", "column 5: found 'a', needs an integer or '}'"),
        ("[2,4]<=[9]", r"replica groups [2, 4] of 9 numbers: needs [groups,members]"),
        ("[2,4]<=[2,4]T(1,1)", "column 8: T(1, 1) is no order of 2 dimensions"),
        ("[0,4]<=[0]", "[0] needs extents above 0, at most 65536 in all"),
        ("[1,99999999]<=[99999999]", "needs extents above 0, at most 65536 in all"),
        ("[1,1]<=[9999999999999999999]", "an integer or ']' of at most 18 digits"),
        ("mesh['d'=2] {'t'}", "replica groups: no mesh axis 't'; known: d"),
        ("mesh['d'=2,'d'=2] {'d'}", "have a name twice"),
        ("mesh['d'=0] {'d'}", "need extents above 0"),
        ("mesh['d'=2], device_ids=(0,0) {'d'}", "need 2 different devices"),
        ("mesh['d'=2] {'d','d'}", "mesh axis 'd' is named twice"),
        ("mesh['d'=8] {'d':(3)2}", "part (3)2 of mesh axis 'd' of 8"),
        ("mesh['d'=12] {'d':(1)4,'d':(6)2}", "parts of mesh axis 'd' do not fit its extent 12"),
        ("mesh[=2] {'d'}", "found '=', needs the name of a mesh axis"),
    ],
)
def test_malformed(text: str, message: str) -> None:
    with pytest.raises(FormatError, match=re.escape(message)):
        groups(text)


def test_numbers_mean_devices_replicas_or_partitions() -> None:
    """Two replicas of two partitions: devices 0 to 3."""
    assert global_groups(((0, 3), (1, 2)), "global", 2, 2) == ((0, 3), (1, 2))
    assert global_groups(((0, 1),), "replica", 2, 2) == ((0, 2), (1, 3))
    assert global_groups(((0, 1),), "partition", 2, 2) == ((0, 1), (2, 3))
    assert global_groups(((0, 1),), "both", 2, 2) == ((0, 1, 2, 3),)
    assert global_groups((), "global", 2, 2) == ((0, 1, 2, 3),)
    assert global_groups((), "replica", 2, 2) == ((0, 2), (1, 3))
    assert global_groups((), "partition", 1, 3) == ((0, 1, 2),)


def test_faults() -> None:
    assert fault(((0, 1), (2, 3)), 4, equal=True) == ""
    assert fault(((0,), ()), 1) == "a group is empty"
    assert fault(((0, 4),), 4) == "rank 4 is none of the 4 ranks"
    assert fault(((0, -1),), 4) == "rank -1 is none of the 4 ranks"
    assert fault(((0, 1), (1,)), 4) == "rank 1 is in two places"
    assert fault(((0, 1),), 3) == "rank 2 is in no group"
    assert fault(((0, 1),), 3, every=False) == ""
    assert fault(((0, 1), (2,)), 3, equal=True) == "groups differ in size: [1, 2]"


def test_meshes_in_any_order_of_axes() -> None:
    mesh = make_mesh([("a", 2), ("b", 3)])
    assert mesh.groups([AxisRef("b"), AxisRef("a")]) == ((0, 3, 1, 4, 2, 5),)
    assert mesh.groups([]) == tuple((rank,) for rank in range(6))
