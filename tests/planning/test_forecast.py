"""The forecast for other minutes: the published law, our own runs, and that more time is never forecast to be worse."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.test_plan import text_of
from tests.support.machines import H200, TWO_CORES
from textmill.planning.forecast import IRREDUCIBLE, describe, forecast, forecast_run, reducible_loss, text_scale
from textmill.planning.plan import MachineProfile


def test_the_law_is_the_published_one() -> None:
    """Muennighoff et al.: 4 epochs are almost worth new text, 40 are not; and Chinchilla's form for a single epoch."""
    assert reducible_loss(1e9, 2e10, 1) == pytest.approx(521 / 1e9**0.353 + 1488 / 2e10**0.353)
    four, fresh = reducible_loss(1e9, 2e9, 4), reducible_loss(1e9, 8e9, 1)
    assert IRREDUCIBLE + four == pytest.approx(IRREDUCIBLE + fresh, rel=0.005)
    assert reducible_loss(1e9, 2e9, 40) > reducible_loss(1e9, 8e10, 1) * 1.1


def test_it_fits_the_trials_of_the_docs_page() -> None:
    """bench/LOG.md: one scale for all nets and epochs on one text, so one of them forecasts the others."""
    per_token, unique = 5.95 * math.log(2), 1.82e6
    runs = [(0.8845, 5.2e6, 8), (0.8276, 5.2e6, 15), (0.8066, 5.2e6, 25), (0.7781, 13.7e6, 20)]
    bits, parameters, epochs = runs[0]
    scale = text_scale(bits * per_token, parameters, unique, epochs)
    for bits, parameters, epochs in runs[1:]:
        expected = (IRREDUCIBLE + scale * reducible_loss(parameters, unique, epochs)) / per_token
        assert expected == pytest.approx(bits, abs=0.03)


@given(st.floats(1e5, 1e10), st.floats(0.5, 100), st.sampled_from([TWO_CORES, H200]))
def test_more_minutes_are_never_forecast_to_be_much_worse(size: float, minutes: float, machine: MachineProfile) -> None:
    half, more = forecast(text_of(size), machine, minutes)
    assert half.change >= -0.05
    assert more.change <= 0.05
    assert "min: about" in describe([half, more])


@given(st.floats(0.5, 4), st.floats(1e5, 1e9), st.floats(1e5, 1e9), st.floats(0.1, 25))
def test_a_finished_run_is_forecast_around_its_own_result(
    bits: float, parameters: float, unique: float, epochs: float
) -> None:
    half, same, more = forecast_run(bits, 4.0, 8192, parameters, unique, epochs, (0.5, 1.0, 4.0))
    assert same == pytest.approx(bits)
    assert half >= same >= more
