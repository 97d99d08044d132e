"""Computes the cost of lost slices, and the best checkpoint interval."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Failures:
  """Rate and cost of failures, after which all slices restart."""

  mtbf_s: float  # mean time between failures of any slice
  restart_s: float  # from a failure to the next step
  save_s: float  # pause of training for a checkpoint

  def interval_s(self) -> float:
    """Returns the checkpoint interval in seconds that loses the least time.

    Uses the approximation of Young, "A first order approximation to the optimum
    checkpoint interval", 1974.
    """
    return math.sqrt(2 * self.save_s * self.mtbf_s)

  def lost_s(self, interval_s: float) -> float:
    """Returns the mean number of seconds that a failure costs."""
    return interval_s / 2 + self.restart_s

  def lost_share(self, interval_s: float) -> float:
    """Returns the share of time lost to failures and to saving."""
    return self.save_s / interval_s + self.lost_s(interval_s) / self.mtbf_s

  def report(self, step_s: float, every: int) -> str:
    """Returns lines about a run that saves a checkpoint every `every` steps."""
    set_s, best_s = every * step_s, self.interval_s()
    best = max(1, round(best_s / step_s))
    return (
      f'failures  one every {self.mtbf_s / 3600:,.1f} h, each costing '
      f'{self.lost_s(set_s) / 60:,.1f} min: half of checkpoint_every and a '
      f'restart; {self.lost_share(set_s):.1%} of time lost, saving included\n'
      f'          {self.lost_share(best_s):.1%} lost with the best interval, '
      f"--config.checkpoint_every='{best} steps', {best_s / 60:,.1f} min"
    )
