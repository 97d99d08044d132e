"""Tables of arrays, and the limits of `Preprocessing`."""

import functools

import numpy as np
import pytest

from vit_jax.checkpoints.formats import table
from vit_jax.checkpoints.formats.table import Entry, File, Preprocessing
from vit_jax.data import preprocessing
from vit_jax.models import variants


def test_the_ends_of_what_images_are_prepared_by():
  most = preprocessing.MAX_SIDE
  whole = Preprocessing(0, (-1e6, 0, 1e6), (1e-6, 1, 1e6))
  assert whole.interpolation == 'bilinear'
  assert Preprocessing(most, interpolation='bicubic').resize_small == most


@pytest.mark.edge
@pytest.mark.parametrize(
  'fields',
  [
    {'resize_small': preprocessing.MAX_SIDE + 1},
    {'mean': (0, 0, -1.1e6)},
    {'mean': (0, 0, 0, 0)},
    {'std': (0.9e-6, 1, 1)},
    {'interpolation': 'lanczos'},
  ],
)
def test_what_is_outside_is_refused_by_its_name(fields):
  ((name, value),) = fields.items()
  with pytest.raises(ValueError) as e:
    Preprocessing(**fields)
  assert str(e.value).startswith(f'{name} is {value!r}')


def halves(shapes):
  """Returns the table of a file that concatenates two of our arrays."""
  return [
    table.one('same', 'plain'),
    table.one('f', 'flat', (lambda x: x.reshape(6), lambda x: x.reshape(2, 3))),
    Entry(
      ('both',),
      ('first', 'last'),
      lambda a, b: (np.concatenate([a, b]),),
      lambda x: tuple(np.split(x, 2)),
    ),
  ]


SHAPES = {'plain': (3,), 'flat': (2, 3), 'first': (1, 2), 'last': (1, 2)}


def read(**arrays):
  rng = np.random.default_rng(0)
  shapes = {'same': 3, 'f': 6, 'both': (2, 2)}
  found = {key: rng.normal(size=shape) for key, shape in shapes.items()}
  file = File('x.npz', found | arrays, {}, halves)
  return table.file_to_ours(file, SHAPES), file.arrays


def test_arrays_become_ours_and_theirs_again():
  both = np.array([[1, 2], [3, -4]], '>f8')
  ours, theirs = read(both=both)
  assert all(x.dtype == np.float32 for x in ours.values())
  np.testing.assert_array_equal(ours['plain'], np.float32(theirs['same']))
  np.testing.assert_array_equal(ours['flat'].ravel(), np.float32(theirs['f']))
  np.testing.assert_array_equal(ours['first'], [[1, 2]])
  np.testing.assert_array_equal(ours['last'], [[3, -4]])
  back = table.ours_to_file(ours, halves)
  assert back.keys() == theirs.keys()
  for key, x in theirs.items():
    np.testing.assert_array_equal(back[key], np.float32(x), key)


def test_arrays_of_float32_are_not_copied():
  x = np.ones(6, np.float32)
  assert np.shares_memory(read(f=x)[0]['flat'], x)


@pytest.mark.edge
@pytest.mark.parametrize(
  ('arrays', 'message'),
  [
    (dict.fromkeys('zyxwvu', np.ones(1)), "has the array 'u', which"),
    ({'f': np.ones((2, 3))}, r"has 'f' of shape \(2, 3\), but \(6,\) is exp"),
    (
      # The last is more than float32 holds.
      {'f': np.array([1, np.nan, np.inf, 2, 3, 1e39])},
      "x.npz: 'f' has 3 values that are not finite in float32",
    ),
  ],
)
def test_wrong_arrays_are_refused_by_key(arrays, message):
  with pytest.raises(ValueError, match=message):
    read(**arrays)


def test_a_missing_array_is_named():
  file = File('x.npz', {'same': np.ones(3), 'f': np.ones(6)}, {}, halves)
  with pytest.raises(ValueError, match="x.npz lacks the array 'both'"):
    table.file_to_ours(file, SHAPES)


def test_what_a_format_cannot_hold_is_named_with_the_way_out():
  """A field must have its default, unless the format stores it."""
  plain = variants.defaults('vit')
  check = functools.partial(
    table.check_writable,
    start='X has',
    names=('vit', 'deit'),
    holds='pool=gap registers',
  )
  for held in (
    {},
    {'pool': 'gap', 'registers': 9},
    {'dropout': 0.5, 'scan': True, 'head_bias': -1.0, 'dtype': 'bfloat16'},
    {'width': 77, 'name': 'deit'},
  ):
    check(plain | held)
  for lost, message in (
    (
      {'pool': 'map'},
      "X has pool 'map', only 'cls' or 'gap'. Choose",
    ),
    (
      {'representation_size': 8},
      'X has representation_size 8, only 0. Leave out the head with --head',
    ),
    ({'name': 'igpt'}, "X has name 'igpt', only 'vit' or 'deit'. Choose"),
  ):
    with pytest.raises(ValueError) as e:
      check(plain | lost)
    assert str(e.value).startswith(message)


def test_patches_of_squares():
  assert [table.square_side(n * n, 'x') for n in (1, 7, 300)] == [1, 7, 300]
  for patches in (-4, -1, 0, 2, 48, 50):
    with pytest.raises(ValueError, match=f'x has .* for {patches} patches, wh'):
      table.square_side(patches, 'x')


def test_all_outputs_are_compared_in_order():
  outputs = {
    'boxes': np.full((2, 4), 3.0),
    'pre_logits': np.full((2, 5), 2.0),
    'logits': np.full((2, 3), 1.0),
    'unknown': np.zeros((2, 7)),
  }
  found = table.compared(outputs)
  np.testing.assert_array_equal(found, [[1.0] * 3 + [2.0] * 5 + [3.0] * 4] * 2)
