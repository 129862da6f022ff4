"""Placements lay equal devices out the same way, whatever the order of the file."""

from __future__ import annotations

from efftra_fx.cluster import Cluster, Device, Link, Links
from efftra_fx.passes.placement import divisors, lines

FOUR = Cluster.uniform(2, 2, None, Link(1e10), Link(1e9))
MIXED = Cluster(
    (Device(0, "slow", None, 0.4), Device(0, "fast"), Device(1, "slow", None, 0.4), Device(1, "fast")),
    Links((Link(1e10), Link(1e10)), Link(1e9)),
)


def test_equal_machines_have_one_line_its_repetitions_and_a_spread() -> None:
    assert list(lines(FOUR)) == [
        ("contiguous", ((0, 1, 2, 3),)),
        ("repeated", ((0, 1), (2, 3))),
        ("repeated", ((0,), (1,), (2,), (3,))),
        ("spread", ((0, 2, 1, 3),)),
    ]


def test_kinds_are_tried_in_every_order_and_alone_with_machines_together() -> None:
    found = dict.fromkeys(order for _, order in lines(MIXED))
    assert ((1, 0, 3, 2),) in found and ((0, 1, 2, 3),) in found
    assert ((1, 3),) in found and ((0, 2),) in found
    assert ((1, 0), (3, 2)) in found  # the same pipeline on each machine


def test_every_line_uses_a_device_once() -> None:
    for cluster in (FOUR, MIXED, Cluster.uniform(3, 4, None, Link(1e10), Link(1e9)), Cluster.local(7)):
        for _, order in lines(cluster):
            devices = [device for group in order for device in group]
            assert len(set(devices)) == len(devices)
            assert len({len(group) for group in order}) == 1


def test_divisors_start_with_one() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
