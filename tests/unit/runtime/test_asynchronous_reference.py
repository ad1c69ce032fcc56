"""The reference for asynchronous training, on cases that are computed by hand."""

import itertools

import pytest
import torch
from torch import nn

from tests.asynchronous_reference import train
from tests.unit.plan.staleness import newest_update_after_move


class Times(nn.Module):
    """Its input times a weight."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(float(weight)))

    def forward(self, value):
        return value * self.weight


class Digits(nn.Module):
    """Adds its weight times 100 to the power of its place."""

    def __init__(self, place):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.0, dtype=torch.float64))
        self.factor = 100.0**place

    def forward(self, value):
        return value + self.factor * self.weight


class Counting(torch.optim.Optimizer):
    """Counts its steps in the weights."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data += 1


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=1.0)


def output(value, _):
    return value


def product(num_minibatches, split, **options):
    """Trains a product of two weights, 10 and 1, which have each other as their gradients."""
    ones = [(torch.tensor(1.0), None)] * num_minibatches
    layers, _, losses = train([Times(10), Times(1)], split, ones, sgd, output, **options)
    return [layer.get_parameter("weight").item() for layer in layers], [
        one.item() for one in losses
    ]


BY_HAND = [
    # One stage: 10 and 1, 9 and -9, 18 and -18.
    ([2], 3, {}, [36, -36], [10, -81, -324]),
    # The first weight lacks the update before, the second none. It is 10, 10, 9, and the second
    # 1, -9, -19.
    ([1, 1], 3, {}, [37, -28], [10, -90, -171]),
    # Drained after two minibatches, the third has 18 and -19.
    ([1, 1], 3, {"drains": [2]}, [37, -37], [10, -90, -342]),
    # Two gradients, halved, are one update: 10 and 1 twice, then 10 and 9 with -9.
    ([1, 1], 4, {"num_accumulated": 2}, [18, -18.5], [10, 10, -90, -81]),
    # An epoch of three: its last update has one minibatch. Then 13.5 and -14.
    ([1, 1], 4, {"num_accumulated": 2, "epochs": [3]}, [20.5, -20.75], [10, 10, -90, -189]),
    # The same without a new epoch: the drain updates nothing.
    ([1, 1], 4, {"num_accumulated": 2, "drains": [3]}, [18, -18.5], [10, 10, -90, -81]),
]


@pytest.mark.parametrize(("split", "num", "options", "weights", "losses"), BY_HAND)
def test_by_hand(split, num, options, weights, losses):
    assert product(num, split, **options) == (weights, losses)


@pytest.mark.parametrize("split", [[2], [1, 1], [0, 2]])
@pytest.mark.parametrize("options", [{}, {"drains": [1, 4]}, {"moves": [(3, [1, 1])]}])
def test_two_buffered_weights_by_hand(split, options):
    """Two minibatches each with 10 and 1, again 10 and 1, 9 and -9: on every split."""
    found = product(6, split, schedule="async-2bw", num_accumulated=2, **options)
    assert found == ([17, -28], [10, 10, 10, 10, -81, -81])


def test_an_epoch_ends_an_update_of_two_buffered_weights():
    """The second update has one minibatch, so the third begins with the fourth one."""
    found = product(4, [1, 1], schedule="async-2bw", num_accumulated=2, epochs=[3])
    # 10 and 1 three times; then the newest, 8.5 and -14.
    assert found == ([8.5 + 7, -14 - 4.25], [10, 10, 10, 8.5 * -14])


def versions(split, num_minibatches, **options):
    """How many updates each layer's weights have in each minibatch."""
    layers = [Digits(place) for place in range(sum(split))]
    zeros = [(torch.zeros((), dtype=torch.float64), None)] * num_minibatches
    losses = train(layers, split, zeros, Counting, output, **options).losses
    return [[int(one.item()) // 100**place % 100 for one in losses] for place in range(sum(split))]


STALENESS = [
    ([1, 1, 1], {}, [[0, 0, 0, 1, 2, 3], [0, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]]),
    ([1, 0, 1], {}, [[0, 0, 0, 1, 2, 3], [0, 1, 2, 3, 4, 5]]),
    ([1, 1], {"drains": [3]}, [[0, 0, 1, 3, 3, 4], [0, 1, 2, 3, 4, 5]]),
    ([1, 1], {"num_accumulated": 3, "epochs": [4]}, [[0, 0, 0, 0, 2, 2], [0, 0, 0, 1, 2, 2]]),
    # Downstream: the new owner waits for the old one's last update, that of minibatch 1.
    ([1, 0], {"moves": [(2, [0, 1])]}, [[0, 0, 1, 3, 4, 5]]),
    ([1, 0, 0, 0], {"moves": [(2, [0, 0, 0, 1])]}, [[0, 0, 0, 0, 1, 5]]),
    # Upstream: the new owner's staleness at once.
    ([0, 1], {"moves": [(2, [1, 0])]}, [[0, 1, 1, 2, 3, 4]]),
    # A drain is all that the new owner has to wait for.
    ([1, 0], {"moves": [(2, [0, 1])], "drains": [2]}, [[0, 0, 2, 3, 4, 5]]),
    # On again before the first move's old owner has made its last update.
    ([1, 0, 0], {"moves": [(2, [0, 1, 0]), (3, [0, 0, 1])]}, [[0, 0, 0, 1, 4, 5]]),
    ([1, 0, 0], {"moves": [(2, [0, 1, 0]), (3, [1, 0, 0])]}, [[0, 0, 0, 1, 2, 3]]),
]


@pytest.mark.parametrize(("split", "options", "expected"), STALENESS)
def test_staleness(split, options, expected):
    assert versions(split, 6, **options) == expected


def test_staleness_after_a_move_is_that_of_the_plan():
    for num_stages in range(1, 6):
        for source, target, begin in itertools.product(
            range(num_stages), range(num_stages), range(1, 4)
        ):
            old, new = ([int(stage == s) for s in range(num_stages)] for stage in (source, target))
            (found,) = versions(old, 10, moves=[(begin, new)])
            expected = [
                max(0, 1 + newest_update_after_move(minibatch, begin, source, target, num_stages))
                for minibatch in range(begin, 10)
            ]
            assert found[begin:] == expected, (num_stages, source, target, begin)


def test_an_update_has_the_learning_rate_of_its_last_minibatch():
    ones = [(torch.tensor(1.0), None)] * 4
    layers, optimizers, _ = train(
        [Times(0), Times(1)],
        [1, 1],
        ones,
        lambda parameters: torch.optim.SGD(parameters, lr=5.0),
        output,
        num_accumulated=2,
        lr_of=lambda minibatch: 10.0**minibatch,
    )
    # The first weight has gradients of 1 before and of 1 again, then of 1 and of 1: the second has
    # 0 twice, then 0 and -10.
    assert layers[0].get_parameter("weight").item() == -10 - 1000
    assert layers[1].get_parameter("weight").item() == 1 + 1000 * 5
    assert [optimizer.param_groups[0]["lr"] for optimizer in optimizers] == [1000.0, 1000.0]


def test_one_stage_is_a_plain_loop():
    """Bit by bit, with momentum and its like, and a layer that is frozen."""

    def model():
        torch.manual_seed(3)
        layers = [nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 2)]
        layers[3].requires_grad_(False)
        return nn.Sequential(*layers)

    def adam(parameters):
        return torch.optim.Adam(parameters, lr=0.01)

    given = model()
    minibatches = [(torch.randn(6, 4), torch.randn(6, 2)) for _ in range(7)]
    found = train(
        list(given), [5], minibatches, adam, nn.functional.mse_loss, num_accumulated=2, epochs=[5]
    )
    assert all(map(torch.equal, given.state_dict().values(), model().state_dict().values()))
    plain = model()
    optimizer = adam([p for p in plain.parameters() if p.requires_grad])
    for number, (inputs, targets) in enumerate(minibatches):
        loss = nn.functional.mse_loss(plain(inputs), targets)
        assert torch.equal(loss, found.losses[number])
        (loss / 2).backward()
        if number in (1, 3, 4, 6):
            optimizer.step()
            optimizer.zero_grad()
    trained = nn.Sequential(*found.layers).state_dict()
    assert all(map(torch.equal, trained.values(), plain.state_dict().values()))
    assert not torch.equal(plain[0].weight, given[0].weight)
