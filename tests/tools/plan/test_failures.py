"""What lost slices cost, against closed forms and simulated failures."""

import re

import numpy as np
import pytest

from vit_jax.tools.plan.costs import Failures

FAILURES = Failures(mtbf_s=50_000.0, restart_s=600.0, save_s=10.0)


def test_the_interval_loses_least():
  best_s = FAILURES.interval_s()
  assert best_s == 1000  # sqrt(2 * 10 * 50,000)
  best = FAILURES.lost_share(best_s)
  assert best == 10 / 1000 + (500 + 600) / 50_000
  assert all(FAILURES.lost_share(best_s * x) > best for x in (0.5, 0.9, 1.1, 2))


def test_losses_are_those_of_failures_at_random():
  """Work done in a year of exponential failures, by counting."""
  rng = np.random.default_rng(0)
  every_s, done_s, whole_s = 2000.0, 0.0, 0.0
  for up_s in rng.exponential(FAILURES.mtbf_s, 20_000):
    done_s += every_s * (up_s // (every_s + FAILURES.save_s))
    whole_s += up_s + FAILURES.restart_s
  lost = 1 - done_s / whole_s
  # First order: the terms left out are of the size of its square.
  assert FAILURES.lost_share(every_s) == pytest.approx(lost, abs=2 * lost**2)


def test_report_names_the_field_and_both_shares():
  text = FAILURES.report(step_s=0.5, every=4000)
  assert 'one every 13.9 h, each costing 26.7 min' in text  # 1000 s + 600 s
  assert '3.7% of time lost' in text  # 10 / 2000 + 1600 / 50,000
  best = "3.2% lost with .* --config.checkpoint_every='2000 steps', 16.7 min"
  assert re.search(best, text)
