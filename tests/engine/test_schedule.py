"""What share stays at each step: values worked out by hand, edges, and the sentences for bad input."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

import platon

PAPER = platon.Cubic(final=0.1, total=100, warmup=20, cooldown=30, every=1)


def test_constant() -> None:
    assert [platon.Constant(0.3)(step) for step in (1, 2, 1000)] == [0.3] * 3


@pytest.mark.parametrize(
    ("step", "keep"),
    [
        (1, None),
        (19, None),  # the last dense step
        (20, 1.0),  # t_i: r(0)
        (45, 0.1 + 0.9 * 0.5**3),  # half way down
        (69, 0.1 + 0.9 * 0.02**3),
        (70, 0.1),  # T - t_f: r(T)
        (100, 0.1),
        (101, 0.1),  # training that goes on stays pruned
    ],
)
def test_cubic(step: int, keep: float | None) -> None:
    assert PAPER(step) == (keep if keep is None else pytest.approx(keep, rel=1e-12))


def test_cubic_is_continuous_at_both_ends() -> None:
    """As printed in the paper the fraction has t - t_i - t_f above the line, and both ends jump."""
    long = dataclasses.replace(PAPER, total=100_000, warmup=20_000, cooldown=30_000)
    assert long(20_000) == pytest.approx(1.0)
    assert long(20_001) == pytest.approx(1.0, abs=1e-4)
    assert long(69_999) == pytest.approx(long(70_000), abs=1e-4)


def test_every_counts_from_one_and_only_during_the_descent() -> None:
    schedule = dataclasses.replace(PAPER, every=10)
    assert [step for step in range(1, 76) if schedule(step) is not None] == [20, 30, 40, 50, 60, *range(70, 76)]
    for step in (20, 30, 40, 50, 60):
        assert schedule(step) == PAPER(step)


def test_every_that_does_not_divide_the_phases() -> None:
    schedule = platon.Cubic(final=0.5, total=20, warmup=5, cooldown=7, every=4)
    assert [step for step in range(1, 21) if schedule(step) is not None] == [8, 12, *range(13, 21)]


def test_no_descent_at_all() -> None:
    schedule = platon.Cubic(final=0.5, total=10, warmup=6, cooldown=4, every=1)
    assert [schedule(step) for step in range(1, 11)] == [None] * 5 + [0.5] * 5


def test_no_phases() -> None:
    schedule = platon.Cubic(final=0.2, total=4, warmup=0, cooldown=0, every=1)
    assert [schedule(step) for step in (1, 2, 3, 4)] == pytest.approx(
        [0.2 + 0.8 * left**3 for left in (0.75, 0.5, 0.25, 0)]
    )


def test_initial_below_one_holds_from_the_first_step() -> None:
    schedule = dataclasses.replace(PAPER, initial=0.6, every=5)
    assert [schedule(step) for step in (1, 4, 5, 15)] == [None, None, 0.6, 0.6]
    assert schedule(20) == pytest.approx(0.6)
    assert schedule(70) == 0.1


def test_a_schedule_without_descent_stays_at_its_initial_share_in_the_warmup() -> None:
    schedule = platon.Cubic(final=0.5, total=2, warmup=2, cooldown=0, every=1, initial=0.75)
    assert [schedule(1), schedule(2)] == [0.75, 0.5]


@given(
    final=st.floats(0.001, 1.0),
    share=st.floats(0.0, 1.0),
    phases=st.tuples(*[st.integers(0, 50)] * 3).filter(any),
    every=st.integers(1, 12),
)
def test_keep_falls_from_initial_to_final(final: float, share: float, phases: tuple[int, int, int], every: int) -> None:
    warmup, ramp, cooldown = phases
    initial = final + share * (1 - final)
    schedule = platon.Cubic(final, sum(phases), warmup, cooldown, every, min(initial, 1.0))
    found = [schedule(step) for step in range(1, sum(phases) + 3)]
    kept = [keep for keep in found if keep is not None]
    assert all(0 < keep <= 1 for keep in kept)
    assert all(later <= earlier * (1 + 1e-12) for earlier, later in itertools.pairwise(kept))
    assert found[-1] == final
    assert all(keep == final for keep in found[max(warmup + ramp - 1, 0) :])


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"final": 80}, "final must be in (0, 1], got 80; write 0.8 for 80 %"),
        ({"final": 0}, "final must be in (0, 1], got 0; give the share of weights that stays"),
        ({"final": -0.1}, "final must be in (0, 1], got -0.1"),
        ({"final": float("nan")}, "final must be in (0, 1], got nan"),
        ({"final": True}, "final must be in (0, 1], got True"),
        ({"final": "0.1"}, "final must be in (0, 1], got 0.1"),
        ({"initial": 20}, "initial must be in (0, 1], got 20; write 0.2 for 20 %"),
        ({"initial": 0.05}, "initial must not be below final (0.1), got 0.05"),
        ({"warmup": 60, "cooldown": 41}, "warmup + cooldown must not exceed total, got 60 + 41 > 100"),
        ({"total": 0}, "total must be a whole number of at least 1, got 0"),
        ({"total": 10.0}, "total must be a whole number of at least 1, got 10.0"),
        ({"warmup": -1}, "warmup must be a whole number of steps, or a share of the training below 1, got -1"),
        ({"cooldown": -1}, "cooldown must be a whole number of steps, or a share of the training below 1, got -1"),
        ({"every": 0}, "every must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_settings(settings: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=r".") as error:
        platon.Cubic(**{"final": 0.1, "total": 100, **settings})
    assert str(error.value).startswith(sentence)


def test_bad_constant() -> None:
    with pytest.raises(ValueError, match=r"keep must be in \(0, 1\], got 80; write 0.8 for 80 %"):
        platon.Constant(80)


def test_repr_is_the_configuration() -> None:
    assert repr(platon.Cubic(0.1, 100, 5)) == (
        "Cubic(final=0.1, total=100, warmup=5, cooldown=0.3, every=10, initial=1.0)"
    )


def test_shares_of_the_training() -> None:
    assert platon.Cubic(0.1, 200) == platon.Cubic(0.1, 200, warmup=0.1, cooldown=0.3, every=10)
    given, counted = platon.Cubic(0.1, 205, 0.1, 0.3, 1), platon.Cubic(0.1, 205, 20, 62, 1)
    assert [given(step) for step in range(1, 206)] == [counted(step) for step in range(1, 206)]


def test_progress_and_elapsed_time() -> None:
    assert [PAPER.elapsed(step) for step in (1, 20, 45, 70, 100)] == [0, 0, 0.5, 1, 1]
    for step in range(1, 101):
        assert PAPER.share(step) == pytest.approx(1 - 0.9 * PAPER.progress(step))
        assert PAPER.progress(step) == pytest.approx(1 - (1 - PAPER.elapsed(step)) ** 3)
