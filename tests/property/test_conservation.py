"""Elastic training conserves: what the devices learn is what arrives, whatever the network does.

One exchange of a device with a server that mixes by a (FedAsync, no discount for staleness):

    w_PS <- (1 - a) w_PS + a w_s          the engine, when the update arrives
    w_i  <- w_i + a (w_PS' - w_s)         the device, when the answer does; w_PS' as it was right after

so (1 - a) w_PS + sum_i w_i, and what is on its way of a (w_PS' - w_s), changes by the local steps alone: that
is looked at after every move, not only when the network is quiet.
"""

from __future__ import annotations

import pytest
from exchanges import CLIENTS, InParts, Server, World
from merges import Replacement

from anabranch.core.model.params import Vector
from anabranch.host.merging import ElasticDelta, Merge, PaperInterpolation

A = 0.5
MOVES = 5_000
ROUNDING = 1e-12


def conserved(rule: Merge, seed: int, moves: int, server: type[Server] = Server) -> World:
    """A world that has conserved after every move, and once it has come to rest."""
    world = World(rule, seed, server)
    for move in range(moves):
        world.move()
        assert not world.learned.any() or world.error() < ROUNDING, f"seed {seed}, move {move}"
    world.settle()
    assert world.error() < ROUNDING, f"seed {seed}, at rest"
    return world


def after_all(rule: Merge, seed: int, server: type[Server] = Server) -> World:
    """A world that has come to rest, whatever it conserved."""
    world = World(rule, seed, server)
    for _ in range(MOVES):
        world.move()
    world.settle()
    return world


@pytest.mark.parametrize("seed", range(2))
def test_the_delta_rule_conserves_exactly_whatever_the_network_does(seed: int) -> None:
    world = conserved(ElasticDelta(A), seed, MOVES)
    counters = world.server.engine.counters
    assert counters.applied > 100
    assert counters.rejected == 0
    assert min(world.lost, world.doubled, world.repeated, counters.duplicates) > 20, "nothing went wrong"


def test_each_part_conserves_by_itself_whatever_the_network_does() -> None:
    """Of every coordinate, so of every part: none is moved by another's exchange."""
    world = conserved(ElasticDelta(A), 0, MOVES, InParts)
    engine = world.server.engine
    drift = abs(world.total() - world.start - world.learned) / abs(world.learned)
    assert drift.max() < 1e-10
    assert engine.counters.applied > 100
    assert {client.accepted > 10 for client in engine.ledger.clients.values()} == {True}
    assert len(set(engine.part_changes.of)) == 3
    assert len(world.devices) == CLIENTS
    for seed in range(100):
        conserved(ElasticDelta(A), seed, 20 + seed, InParts)


def test_two_hundred_interleavings_conserve() -> None:
    for seed in range(200):
        conserved(ElasticDelta(A), seed, 20 + seed)


@pytest.mark.prove
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("first", range(0, 5_000, 500))
def test_five_thousand_interleavings_conserve(first: int) -> None:
    for seed in range(first, first + 500):
        conserved(ElasticDelta(A), seed, 400)


@pytest.mark.parametrize("rule", [PaperInterpolation(A), Replacement()], ids=["interpolation", "replacement"])
def test_the_other_rules_do_not(rule: Merge) -> None:
    assert after_all(rule, 0).error() > 0.1


def test_a_model_of_another_moment_would_not_do() -> None:
    """The answer must be the version that the update made: a later one pulls twice towards the others."""

    class Late(Server):
        def model(self, version: int) -> Vector | None:
            return self.engine.vector.copy()

    assert after_all(ElasticDelta(A), 0, Late).error() > 0.1


def test_an_answer_that_is_merged_twice_would_not_do() -> None:
    """What the session's ids prevent, although answers come twice."""

    class Twice(ElasticDelta):
        def apply(self, live: object, snapshot: Vector, center: Vector) -> None:
            for _ in range(2):
                super().apply(live, snapshot, center)  # type: ignore[arg-type]

    assert after_all(Twice(A), 0).error() > 0.1
