"""Weakly held objects: who is in, who is gone, and changes while somebody looks."""

import gc

from apex._core.living import Living


class Thing:
    pass


def test_objects_are_held_weakly_and_once():
    living, things = Living(), [Thing(), Thing()]
    for thing in (*things, things[0]):
        living.add(thing)
    assert list(living) == things
    assert living
    del things[0], thing
    assert list(living) == things
    del things[:]
    gc.collect()
    assert not living


def test_objects_may_come_and_go_while_somebody_iterates():
    """As in other threads, and in a garbage collection."""
    living, things = Living(), [Thing() for _ in range(4)]
    for thing in things:
        living.add(thing)
    first = things[0]
    seen = []
    for each in living:
        seen.append(each)
        if each is first:
            things.append(Thing())
            living.add(things[-1])
            del things[2]
    assert len(seen) == 3
    assert list(living) == things


def test_it_is_not_confused_by_an_address_that_is_used_again():
    living = Living()
    for _ in range(100):
        thing = Thing()
        living.add(thing)
        assert list(living) == [thing]
