"""The search of `plan`, with a made-up compiler whose best step is known."""

import itertools

import pytest

from configs import vit
from vit_jax import config as config_lib
from vit_jax.tools.plan import search

pytestmark = pytest.mark.filterwarnings('ignore:the load_module:')

# What a layer keeps of an image, and how much longer a step takes for it.
KEPT = {
  'none': (1.0, 1.0),
  'cheap': (0.5, 1.05),
  'nothing_saveable': (0.1, 1.3),
}
TENSOR = (1, 2, 4)
FIELDS = (
  *('gather', 'mesh.tensor', 'model.scan', 'model.remat'),
  *('accum_steps', 'mesh.data', 'mesh.fsdp'),
)


def compiler(memory, params, devices, batch_size):
  """Returns a function that 'compiles', and the list of what it was given."""
  tried = []

  def compiled(config):
    flat = config_lib.flatten(config)
    tried.append({name: flat[name] for name in FIELDS})
    tensor = config.mesh.tensor
    shards = devices // tensor
    images = batch_size // shards // config.accum_steps
    assert images * shards * config.accum_steps == batch_size
    each, slower = KEPT[config.model.remat]
    held = params / tensor if config.gather == 'step' else params / devices
    if held + images * each / tensor > memory:
      raise search.TooLarge('too large')
    seconds = batch_size / devices * slower + 0.5 * config.accum_steps
    seconds *= 1.1 if config.model.scan else 1.0
    seconds *= 1.2 if config.gather == 'layer' else 1.0
    return seconds * (1.0 + 0.3 * (tensor - 1)), 'a step'

  return compiled, tried


def fastest(memory, params, devices, batch_size):
  """Returns the least time of all combinations there are."""
  compiled, _ = compiler(memory, params, devices, batch_size)
  config = vit.get_config('ti16')
  config.batch_size = batch_size
  times = []
  for kept, scan, gather, tensor in itertools.product(
    KEPT, (False, True), ('step', 'layer'), TENSOR
  ):
    each = batch_size * tensor // devices
    for parts in (n for n in range(1, each + 1) if each % n == 0):
      config.accum_steps = parts
      config.model.update(scan=scan, remat=kept)
      config.gather, config.mesh.tensor = gather, tensor
      try:
        times.append(compiled(config)[0])
      except search.TooLarge:
        pass
  return min(times, default=None)


@pytest.mark.parametrize(
  ('memory', 'params'),
  [(100, 1), (9, 1), (3, 1), (9, 8.5), (0.2, 1), (0.01, 1)],
)
def test_the_fastest_that_fits_is_found(memory, params):
  setting = memory, params, 16, 16 * 24
  compiled, tried = compiler(*setting)
  config = vit.get_config('l16')
  config.batch_size = 16 * 24
  config.mesh.data = config.mesh.fsdp = 4
  best = search.best(config, 16, compiled)
  want = fastest(*setting)
  assert (best is None) == (want is None)
  if best:
    # However few devices the config has along these.
    assert best.fields['mesh.data'] == best.fields['mesh.fsdp'] == -1
    assert best.step_s == pytest.approx(want)
    assert best.fields == tried[-1] or best.fields in tried
  assert len(tried) == len({tuple(sorted(f.items())) for f in tried})
  assert config.accum_steps == 1 and not config.model.scan  # not touched


@pytest.mark.parametrize('images', [8, 3])
def test_what_fits_as_it_is_takes_two_compilations(images):
  """However few images there are for a core."""
  compiled, tried = compiler(100, 1, 16, 16 * images)
  config = vit.get_config('l16')
  config.batch_size = 16 * images
  best = search.best(config, 16, compiled)
  assert [fields['model.scan'] for fields in tried] == [True, False]
  assert best.fields['accum_steps'] == 1
  assert best.fields['model.remat'] == 'none'


@pytest.mark.parametrize('memory', [100, 9])
def test_a_program_that_fits_only_with_the_loop_keeps_it(memory):
  """And without it nothing is tried that keeps less."""
  compiled, _ = compiler(memory, 1, 16, 16 * 8)
  tried = []

  def looped(config):
    if not config.model.scan:
      tried.append(config.model.remat)
      raise search.TooLarge('too large')
    return compiled(config)

  config = vit.get_config('l16')
  config.batch_size = 16 * 8
  best = search.best(config, 16, looped)
  assert best.fields['model.scan']
  kept = [*search.KEPT]
  assert tried == kept[: kept.index(best.fields['model.remat']) + 1]


@pytest.mark.parametrize(('batch_size', 'tensor'), [(8, 2), (24, 2), (4, 4)])
def test_cores_that_would_have_no_image_of_their_own_share(batch_size, tensor):
  compiled, _ = compiler(100, 1, 16, batch_size)
  config = vit.get_config('l16')
  config.batch_size = batch_size
  best = search.best(config, 16, compiled)
  assert best.fields['mesh.tensor'] == tensor
  assert best.fields['accum_steps'] == 1


def test_a_batch_smaller_than_the_topology_is_not_called_too_large():
  """What compiles refuses it, and names batch sizes that can be."""

  def compiled(config):
    raise ValueError(f'{config.batch_size} by {config.accum_steps} parts')

  config = vit.get_config('ti16')
  config.batch_size = 8
  with pytest.raises(ValueError, match='8 by 1 parts'):
    search.best(config, 256, compiled)


def test_each_way_of_keeping_begins_where_the_one_before_ended():
  """24 images a core, of which one takes 1, .5 or .1 of 8 above parameters.

  Least halves what is open between 1, 2, 3, 4, 6, 8, 12 and 24; what keeps less
  is not tried with fewer images than fit before.
  """
  compiled, tried = compiler(9, 1, 16, 16 * 24)
  config = vit.get_config('l16')
  config.batch_size = 16 * 24
  best = search.best(config, 16, compiled)
  assert [
    (x['model.remat'], 24 // x['accum_steps'], x['model.scan']) for x in tried
  ] == [
    *(('none', images, True) for images in (24, 4, 8, 12)),
    *(('cheap', images, True) for images in (24, 8, 12)),
    ('nothing_saveable', 24, True),
    ('none', 8, False),
  ]
  assert best.images == 8


def test_where_eight_images_fit_no_other_place_is_tried():
  """Though none do without what is computed twice."""
  compiled, tried = compiler(1.9, 1, 16, 16 * 8)
  config = vit.get_config('l16')
  config.batch_size = 16 * 8
  best = search.best(config, 16, compiled)
  assert (best.images, best.fields['model.remat']) == (8, 'nothing_saveable')
  assert {fields['gather'] for fields in tried} == {best.fields['gather']}


def test_devices_are_not_divided_by_what_does_not_divide_them():
  compiled, tried = compiler(0.01, 1, 6, 6 * 4)
  config = vit.get_config('ti16')
  config.batch_size = 6 * 4
  assert search.best(config, 6, compiled) is None
  assert {fields['mesh.tensor'] for fields in tried} == {1, 2}
