"""Tests the set of objects that still exist."""

from treering._threads.forks import WeakRegistry


class _Thing:
    pass


def test_objects_may_come_and_go_while_others_go_through_them() -> None:
    alive: WeakRegistry[_Thing] = WeakRegistry()
    kept = [_Thing() for _ in range(3)]
    for one in kept:
        alive.add(one)
    for _ in alive.all():
        kept.append(_Thing())
        alive.add(kept[-1])
    assert sorted(map(id, alive.all())) == sorted(map(id, kept))
    del kept[1:], one, _
    assert alive.all() == kept
