"""How many CPU cores there are to use."""

from __future__ import annotations

import os


def usable_cores() -> int:
  """Cores this process may run on, which containers and pinning restrict."""
  if hasattr(os, 'sched_getaffinity'):  # Linux only.
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1
