"""Converts durations of a config to steps."""

import dataclasses
import fractions
import math
import re

from ml_collections import ConfigDict

# Devices count steps in int32.
_MOST_STEPS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Durations:
  """The run's durations in steps."""

  total: int
  warmup: int
  milestones: tuple[int, ...]
  log_every: int
  eval_every: int
  checkpoint_every: int


def durations_of(config: ConfigDict, examples: int) -> Durations:
  """Returns the config's durations in steps.

  A warm-up in percent leaves at least one step after it. If a run has fewer
  than 4 * `log_every` steps, it is logged every `total` // 10 steps instead, or
  every step if that is 0.

  Raises:
    ValueError: if a value is invalid.
  """
  optimizer = config.optimizer

  def steps(field: str, duration: str) -> int:
    try:
      return steps_of(
        duration,
        batch_size=config.batch_size,
        examples=examples,
        total_steps=None if field == 'total' else total,
      )
    except ValueError as e:
      raise ValueError(f'{field}: {e}') from e

  def period(field: str) -> int:
    if re.match(r'\s*[0.]+(?![\d.])', config[field]):
      raise ValueError(
        f'{field} is {config[field]!r}, but 0 does not mean "never". Give a '
        f'number of steps, or {config.total!r} for once at the end.'
      )
    return max(1, steps(field, config[field]))

  total = steps('total', config.total)
  if not 1 <= total <= _MOST_STEPS:
    raise ValueError(
      f'total is {config.total!r}, {total:,} steps of batch_size '
      f'{config.batch_size:,} over {examples:,} examples. Set it to at least '
      f'one step and at most {_MOST_STEPS:,}.'
    )
  warmup = steps('optimizer.warmup', optimizer.warmup)
  if '%' in optimizer.warmup:
    warmup = min(warmup, total - 1)
  log_every = period('log_every')
  return Durations(
    total=total,
    warmup=warmup,
    milestones=tuple(
      steps('optimizer.milestones', x) for x in optimizer.milestones
    ),
    log_every=log_every if total >= 4 * log_every else max(1, total // 10),
    eval_every=period('eval_every'),
    checkpoint_every=period('checkpoint_every'),
  )


def steps_of(
  duration: str,
  *,
  batch_size: int,
  examples: int,
  total_steps: int | None = None,
) -> int:
  """Returns the steps of a duration.

  Durations are '10000 steps' (the unit may be left out) of `batch_size`
  examples, '90 epochs' of `examples`, '1e6 examples', and '5%' of
  `total_steps`. Percentages are rounded up, others to the nearest step.

  Raises:
    ValueError: if the duration is invalid.
  """
  match = re.fullmatch(
    r'\s*(\d+(?:\.\d*)?(?:e\d+)?)\s*(step|epoch|example|%|)(?:(?<=[a-z])s)?\s*',
    str(duration),
  )
  if (
    not match
    or not math.isfinite(float(match[1]))
    or (match[2] == '%' and total_steps is None)
  ):
    units = 'steps, epochs, examples'
    if total_steps is not None:
      units += ', %'
    raise ValueError(
      f'{duration!r} is not a duration. Write a number and one of {units}, as '
      'in "90 epochs".'
    )
  if match[2] == '%':
    # Rounds up, because rounding down would add a sixth, short period to five
    # periods of '20%'. Fractions are exact; in floating point, 1.1 * 100000 is
    # slightly above 110000 and would be rounded up to one step more.
    return math.ceil(fractions.Fraction(match[1]) * (total_steps or 0) / 100)
  number = float(match[1])
  if match[2] == 'epoch':
    return round(number * examples / batch_size)
  return round(number / batch_size if match[2] == 'example' else number)
