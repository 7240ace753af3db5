"""How calls are timed: the order of each round, what comes between calls, what counts."""

import itertools

import pytest
from harness.timing import interleaved, median, ratio, spread


class Card:
    """A card whose calls take what one says, in milliseconds; the host takes no time."""

    def __init__(self, **costs):
        self.costs, self.now, self.made, self.waits = costs, 0.0, [], 0

    def calls(self):
        return {name: lambda name=name: self.make(name, self.costs[name]) for name in self.costs}

    def make(self, name, cost):
        self.made.append(name)
        self.now += cost(self.made.count(name)) if callable(cost) else cost

    def mark(self):
        return self.now

    def wait(self):
        self.waits += 1

    def ms(self, begin, end):
        return end - begin

    def flush(self):
        self.make("flush", 0.1)


def timed(card, **options):
    times = interleaved(card.calls(), clock=card, **{"seconds": 0.0, **options})
    return times, card.made


def rounds_of(made, names, warm_up):
    """The calls of each round, without the first, which is not counted."""
    made = made[warm_up:]
    size = len(names) + 1
    return [made[at + 1 : at + size] for at in range(0, len(made), size)]


def test_every_round_makes_every_call_in_an_order_of_its_own():
    names = ("ours", "flash2", "cudnn", "triton")
    times, made = timed(Card(**dict.fromkeys(names, 2.0)))
    rounds = rounds_of(made, names, warm_up=8)
    assert len(rounds) == 9  # the least, however little time there is
    assert all(sorted(order) == sorted(names) for order in rounds)
    assert len({tuple(order) for order in rounds}) > 5
    assert len({order[0] for order in rounds}) > 2
    assert times == {name: [2.0] * 9 for name in names}


def test_the_order_is_the_seeds():
    orders = [timed(Card(a=2.0, b=2.0, c=2.0), seed=seed)[1] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize(
    ("seconds", "options", "rounds"),
    [
        (0.1, {}, 25),
        (9.0, {}, 30),
        (0.0, {"min_rounds": 3}, 3),
        (0.0, {"min_rounds": 40}, 40),
        (9.0, {"max_rounds": 12}, 12),
    ],
)
def test_time_decides_the_rounds_within_bounds(seconds, options, rounds):
    times, _ = timed(Card(a=3.0, b=1.0), seconds=seconds, **options)
    assert len(times["a"]) == len(times["b"]) == rounds


def test_short_calls_are_repeated_and_their_mean_counts():
    card = Card(long=4.0, short=lambda n: 0.2 if n % 2 else 0.3)
    times, made = timed(card)
    assert times["short"] == pytest.approx([0.25] * 9, rel=0.21)
    assert made.count("short") > 9 * 3
    assert card.waits == 2 + 9  # one for each estimate, one a round: nothing waits between calls


def test_nothing_is_left_in_l2_where_it_is_flushed():
    card = Card(long=4.0, short=lambda n: 0.2 if n % 10 else 7.0)  # the host was late now and then
    times, made = timed(card, flush=True)
    counted = made[6:]
    assert times["short"] == pytest.approx([0.2] * 9)  # the median of a round's
    assert times["long"] == pytest.approx([4.0] * 9)  # the flush itself is not in it
    pairs = list(itertools.pairwise(counted))
    warm = sum(one != "flush" and before != "flush" for before, one in pairs) + (counted[0] != "flush")
    assert warm == 9  # the call of each round that is not counted
    assert made.count("flush") == 2 + 9 * (1 + 5)
    _, made = timed(Card(short=0.001), flush=True)
    assert made.count("flush") == 1 + 9 * 16  # a flush takes longer than such a call


def test_medians_and_spreads():
    assert median([3, 1, 2]) == 2
    assert spread([1, 1, 1]) == 0
    assert spread([1, 2, 3, 4, 5]) == round(2 / 3, 4)
    assert list(ratio([2, 6], [1, 2])) == [2, 3]
