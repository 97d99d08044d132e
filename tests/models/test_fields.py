"""Every field of every model: its declaration, and values outside it."""

import dataclasses

import pytest

from vit_jax.models import fields, variants

DECLARED = [
  pytest.param(field, id=f'{kind}-{field.name}')
  for kind in variants.ARCHITECTURES
  for field in variants.ARCHITECTURES.load(kind).own_fields()
]


@pytest.mark.parametrize('field', DECLARED)
def test_a_default_is_valid_and_anything_else_is_refused_by_name(field):
  of = field.metadata
  assert of['doc'].endswith('.')
  if field.default is not fields.REQUIRED:
    fields.check([field], {})
  number = isinstance(field.default, int | float) and not isinstance(
    field.default, bool
  )
  assert of['valid'] or not number
  wrong = []
  if isinstance(of['valid'], tuple):
    wrong = [-1, 'other']
  elif of['valid']:
    low, high = map(float, of['valid'][1:-1].split(', '))
    wrong = [low - (of['valid'][0] == '['), float('nan'), 'one']
    wrong += [high + (of['valid'][-1] == ']')]
    if isinstance(field.default, tuple):
      wrong = [(x,) for x in wrong]
  if of['multiple'] > 1:
    wrong += [of['multiple'] + 1]
  for value in wrong:
    with pytest.raises(ValueError, match=f'^model.{field.name} is '):
      fields.check([field], {field.name: value})


def test_a_field_stays_at_its_default_where_it_does_not_apply():
  @dataclasses.dataclass
  class Model:
    wide: bool = fields.field(False, 'Wide.')
    high: bool = fields.field(False, 'High.')
    steps: int = fields.field(3, 'Steps.', unless='wide')
    colour: str = fields.field('red', 'Colour.', needs='high')

  declared = dataclasses.fields(Model)
  for works in (
    {},
    {'wide': True, 'high': True, 'colour': 'blue'},
    {'steps': 4},
    {'wide': True, 'steps': 3, 'colour': 'red'},
  ):
    fields.check(declared, works)
  for wrong, message in (
    ({'wide': True, 'steps': 4}, 'model.steps is 4, which cannot be combined'),
    ({'colour': 'blue'}, "model.colour is 'blue', which needs model.high"),
  ):
    with pytest.raises(ValueError, match=message):
      fields.check(declared, wrong)


def test_frozen_fields_are_equal_and_hashable():
  model = variants.build_model('ti16', registers=2)
  first, second = fields.frozen(model), fields.frozen(model.clone())
  assert (first, hash(first)) == (second, hash(second))
  assert first != fields.frozen(model.clone(registers=3))
  assert first.registers == 2
