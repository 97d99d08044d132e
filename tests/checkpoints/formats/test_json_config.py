"""The valid values of a configuration, and their limits."""

import math

import pytest

from vit_jax.checkpoints.formats.json_config import (
  SQUARE,
  JsonConfig,
  Key,
  choices,
  to_config,
)
from vit_jax.data.preprocessing import MAX_SIDE


def stated(value, under=''):
  return JsonConfig({'key': value}, 'x.json', under)


def read(method, value):
  bound = [1] if method == 'above_zero' else []
  return getattr(stated(value), method)('key', *bound)


@pytest.mark.parametrize(
  ('method', 'value', 'want'),
  [
    ('positive', 10**9, 10**9),
    ('above_zero', 1e-300, 1e-300),
    ('sides', 1, (1, 1)),
    ('sides', [2, 3], (2, 3)),
    ('sides', {'width': 3, 'height': 2}, (2, 3)),
    ('rgb', 2, (2.0, 2.0, 2.0)),
    ('rgb', [1, 2.5, -3], (1.0, 2.5, -3.0)),
    ('part', {'a': 1, 'b': None, 'c': 0}, {'a': 1, 'c': 0}),
    ('part', None, {}),
  ],
)
def test_what_makes_sense_is_read(method, value, want):
  found = read(method, value)
  assert found == want
  if method == 'above_zero':
    assert type(found) is float


@pytest.mark.edge
@pytest.mark.parametrize(
  ('method', 'value', 'message'),
  [
    *(('positive', x, 'a positive integer') for x in (0, True, 2.0)),
    *(
      ('above_zero', x, 'above 0 and at most 1')
      for x in (0, 1.001, True, math.nan)
    ),
    *(
      ('sides', x, 'height and width, from 1 to 65,536 pixels')
      for x in (0, MAX_SIDE + 1, True, [2, 3, 4])
    ),
    ('sides', {'height': 2}, 'height and width'),
    *(
      ('rgb', x, 'three numbers, for red, green and blue')
      for x in ([1, 2], True, [1, 10**400, 1])
    ),
    ('part', [1], 'an object'),
  ],
)
def test_what_makes_none_is_refused_by_key(method, value, message):
  with pytest.raises(ValueError) as e:
    read(method, value)
  found = str(e.value)
  assert found.startswith(f'x.json: key is {value!r}; it must be {message}')


def test_parts_are_named_by_what_leads_to_them():
  outer = JsonConfig({'a': {'b': {'c': 1}}}, 'x.json')
  inner = outer.part('a').part('b')
  with pytest.raises(ValueError, match=r'^x.json: a\.b\.c is 1, so$'):
    inner.refuse('c', ', so')
  with pytest.raises(ValueError, match=r'^x.json: a\.b\.d is 2, so$'):
    inner.replace({'d': 2}).refuse('d', ', so')
  inner.warn('this.')
  assert outer.warnings == inner.warnings == ['x.json: this.']
  assert JsonConfig({}, 'y.json').warnings == []


KEYS = {
  'dim': Key('width'),
  'act': Key('gelu', choices({'tanh': 'tanh', 'new': 'tanh'}), 'new'),
  'patch': Key('patch_size', SQUARE),
  'groups': Key(only=(32, None)),
  'rest': Key(),
}


def test_a_table_reads_what_it_writes():
  fields = {'width': 3, 'gelu': 'tanh', 'patch_size': 8}
  config = to_config(KEYS, fields)
  assert config == {'dim': 3, 'act': 'tanh', 'patch': 8, 'groups': 32}
  arrays = {'width': 3, 'patch_size': 8}
  for changes in ({}, {'patch': [8, 8], 'rest': 'x', 'dim': None}):
    found = JsonConfig(config | changes, 'x.json').fields(KEYS, arrays, 'vit')
    assert found == {'gelu': 'tanh'}
  assert JsonConfig({}, 'x.json').fields(KEYS, arrays, 'vit') == {
    'gelu': 'tanh'
  }


def test_all_contradictions_are_listed():
  found = JsonConfig({'dim': 4, 'patch': [8, 9], 'groups': 1}, 'x.json', 'a.')
  with pytest.raises(ValueError) as e:
    found.fields(KEYS, {'width': 3, 'patch_size': 8}, 'vit')
  assert str(e.value) == (
    'x.json (vit): a.dim is 4, and the arrays have 3; a.patch is [8, 9], and '
    'the arrays have 8; a.groups is 1, and vit_jax supports only 32.'
  )


@pytest.mark.parametrize(
  ('sides', 'want'),
  [
    ((48, 32), (48, 32)),
    ((50, 37), (48, 32)),
    ((48, 47), (48, 32)),
    # Less than a patch stays; the model refuses it.
    ((8, 40), (8, 32)),
  ],
)
def test_sides_are_of_whole_patches(sides, want):
  found = stated(0)
  assert found.whole_patches(sides, 16) == want
  assert len(found.warnings) == (sides != want)
  for warning in found.warnings:
    assert f'{sides[0]}x{sides[1]} pixels, which patches of 16' in warning
    assert warning.endswith(f'vit_jax uses {want[0]}x{want[1]}.')
