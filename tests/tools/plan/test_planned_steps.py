"""The schedule of the planned step of L/16 stays that of the golden file.

A change that undoes a sharding or a layout shows here before it costs a TPU its
time. `planned_steps` says what the numbers are and how to write them anew.
"""

import json

import pytest

from tests.conftest import ROOT
from tests.tools.plan import planned_steps

GOLDEN = json.loads((ROOT / 'tests/golden/planned_steps.json').read_text())


@pytest.mark.slow
@pytest.mark.parametrize('topology', planned_steps.TOPOLOGIES)
def test_the_schedule_is_that_of_the_golden(topology, monkeypatch):
  pytest.importorskip('libtpu', reason='needs the extra `plan`')
  versions = planned_steps.versions()
  if versions != GOLDEN['versions']:
    pytest.skip(f'the golden is of {GOLDEN["versions"]}, here are {versions}')
  monkeypatch.chdir(ROOT)
  assert planned_steps.in_new_process(topology) == GOLDEN['steps'][topology]
