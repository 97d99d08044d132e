"""Ctrl-C in a command: one line, whenever it comes.

Python prints a traceback of whatever module was just being imported, and loses
an interrupt that comes in a callback, such as a garbage collector's: the
command then runs on.
"""

import os
import signal
import sys
import threading
from typing import Any

EXIT_INTERRUPTED = 128 + signal.SIGINT
# After which a lost interrupt is sent again, from outside of the callback.
_AGAIN_S = 0.05


def end_at_once() -> None:
  """Has Ctrl-C end the process, until `raise_errors`: for while it imports."""
  # Ignored in what a shell runs in the background, and so it stays.
  if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, _end)


def raise_errors() -> None:
  """Has Ctrl-C raise KeyboardInterrupt again, and none be lost.

  Changes nothing where `end_at_once` was not called, in other programs.
  """
  if signal.getsignal(signal.SIGINT) is not _end:
    return
  signal.signal(signal.SIGINT, signal.default_int_handler)
  others = sys.unraisablehook

  def hook(problem: 'sys.UnraisableHookArgs') -> None:
    if problem.exc_type is KeyboardInterrupt:
      main = threading.main_thread().ident
      again = threading.Timer(
        _AGAIN_S, signal.pthread_kill, (main, signal.SIGINT)
      )
      again.daemon = True
      again.start()
    else:
      others(problem)

  sys.unraisablehook = hook


def _end(number: int, frame: Any) -> None:
  os.write(2, b'interrupted\n')
  os._exit(EXIT_INTERRUPTED)
