import random
from itertools import pairwise

import pytest

from lightning_pipeshift.plan.inputs.flow import Call, Flow, TensorSpec, Value, call_order, merged


def spec(*shape, itemsize=4):
    return TensorSpec(shape, (1,) * len(shape), "torch.float32", itemsize)


def random_flow(dice):
    """Layers in order, some called twice or not at all, each call with up to three leaves."""
    calls: list[Call] = []
    made: list[Value] = []
    num_layers = dice.randrange(1, 7)
    for layer in range(num_layers):
        for number in range(dice.choice([0, 1, 1, 1, 1, 2])):
            needs = {value for value in made if value.layer < layer and dice.random() < 0.3}
            leaves = tuple(
                spec(dice.randrange(5), 3) if dice.random() < 0.8 else None
                for _ in range(dice.randrange(1, 4))
            )
            calls.append(Call(layer, number, leaves, frozenset(needs)))
            made += [Value(layer, number, i) for i, leaf in enumerate(leaves) if leaf]
    some = lambda: frozenset(value for value in made if dice.random() < 0.2)  # noqa: E731
    return Flow(tuple(calls), some(), some(), some()), num_layers


def carried(flow, boundary):
    """By the meaning of the word: what an earlier layer made and somebody behind the boundary uses.

    The tail and whoever reads control values are behind every boundary.
    """
    found = []
    for maker in flow.calls:
        for leaf in range(len(maker.leaves)):
            value = Value(maker.layer, maker.call, leaf)
            users = [call.layer for call in flow.calls if value in call.needs]
            last_use = max(users, default=-1)
            if value in flow.tail or value in flow.control:
                last_use = 10**6
            if maker.layer < boundary <= last_use:
                found.append(value)
    return tuple(sorted(found))


def test_payloads_by_brute_force():
    for seed in range(200):
        flow, num_layers = random_flow(random.Random(seed))
        for boundary in range(num_layers + 1):
            expected = carried(flow, boundary)
            assert flow.payload(boundary) == expected, seed
            num_bytes = sum(12 * flow.spec(value).shape[0] for value in expected)
            assert flow.payload_bytes(boundary) == num_bytes, seed
        assert flow.payload(0) == (), seed


@pytest.mark.parametrize("seed", range(50))
def test_each_stage_has_what_it_needs(seed):
    """Whatever the split, what a stage's calls need is in its payload or made by itself, and what
    it passes on it has received or made.
    """
    dice = random.Random(seed)
    flow, num_layers = random_flow(dice)
    cuts = sorted(dice.randrange(num_layers + 1) for _ in range(3))
    bounds = [0, *cuts, num_layers]
    for start, stop in pairwise(bounds):
        here = set(flow.payload(start))
        for call in [call for call in flow.calls if start <= call.layer < stop]:
            assert call.needs <= here
            here |= {Value(call.layer, call.call, i) for i, leaf in enumerate(call.leaves) if leaf}
        assert set(flow.payload(stop)) <= here
    assert flow.tail | flow.control <= here


def flow_of(layers):
    calls: list[Call] = []
    for layer in layers:
        number = sum(call.layer == layer for call in calls)
        calls.append(Call(layer, number, (spec(1),), frozenset()))
    return Flow(tuple(calls), frozenset(), frozenset(), frozenset())


@pytest.mark.parametrize(
    ("calls", "num_layers", "expected"),
    [
        ([], 3, [0, 1, 2]),
        ([0, 1, 2], 3, [0, 1, 2]),
        ([2, 0, 1], 3, [2, 0, 1]),
        # Called twice in a row.
        ([1, 1, 0], 2, [1, 0]),
        # The first call decides.
        ([0, 1, 3, 0, 1, 2], 4, [0, 1, 3, 2]),
        # A layer that is never called stays behind its predecessor in the tree, or comes first.
        ([2, 0, 3], 4, [2, 0, 1, 3]),
        ([1, 2], 3, [0, 1, 2]),
        ([3, 1], 5, [0, 3, 4, 1, 2]),
    ],
)
def test_call_order(calls, num_layers, expected):
    assert call_order(calls, num_layers) == expected


@pytest.mark.parametrize(
    ("flows", "expected"),
    [
        ([[0, 1, 2]], [0, 1, 2]),
        # By chance each calls one of the two in the middle.
        ([[0, 2, 3], [0, 1, 3]], [0, 1, 2, 3]),
        ([[0, 1, 3], [0, 2, 3], [0, 3]], [0, 1, 2, 3]),
        # A later module in the tree is called before them.
        ([[0, 4, 2], [0, 4, 1]], [0, 4, 1, 2]),
        ([[1, 1, 0]], [1, 0]),
        # No order agrees with both.
        ([[0, 1], [1, 0]], [0, 1]),
    ],
)
def test_flows_that_call_some_layers_at_a_time(flows, expected):
    found = merged([flow_of(flow) for flow in flows])
    assert list(dict.fromkeys(call.layer for call in found.calls)) == expected


@pytest.mark.parametrize("seed", range(50))
def test_call_order_is_a_permutation_that_keeps_the_flows_order(seed):
    dice = random.Random(seed)
    num_layers = dice.randrange(1, 7)
    calls = dice.sample(range(num_layers), dice.randrange(num_layers + 1))
    order = call_order(calls, num_layers)
    assert sorted(order) == list(range(num_layers))
    assert [layer for layer in order if layer in calls] == calls


def test_specs():
    calls = (
        Call(0, 0, (spec(2, 3), None, spec(itemsize=8)), frozenset()),
        Call(0, 1, (spec(0, 3),), frozenset()),
    )
    flow = Flow(calls, frozenset(), frozenset(), frozenset())
    assert flow.spec(Value(0, 0, 0)).num_bytes == 24
    assert flow.spec(Value(0, 0, 2)).num_bytes == 8
    assert flow.spec(Value(0, 1, 0)).num_bytes == 0
    with pytest.raises(KeyError):
        flow.spec(Value(1, 0, 0))


def test_a_flow_is_a_value():
    assert flow_of([0, 1]) == flow_of([0, 1]) != flow_of([1, 0])
    assert len({flow_of([0, 1]), flow_of([0, 1])}) == 1
