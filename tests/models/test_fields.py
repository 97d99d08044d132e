"""Declared fields of models, and values that they refuse."""

import dataclasses

import pytest

from vit_jax.models import fields, variants


@pytest.mark.parametrize(
  ('rules', 'works', 'wrong'),
  [
    ({'valid': ('red', 'blue')}, ['blue'], ['green', -1]),
    ({'valid': '[0, 1)'}, [0, 0.9], [-0.1, 1, float('nan'), 'one']),
    ({'valid': '(0, 1]'}, [0.1, 1], [0, 1.1]),
    ({'valid': '(-inf, inf)'}, [-1e9], [float('inf')]),
    ({'valid': '[1, 9]'}, [(1, 9), ()], [(1, 0), (10,)]),
    ({'valid': '[0, inf)', 'multiple': 32}, [64], [33]),
  ],
)
def test_values_outside_a_declaration_are_refused_by_name(rules, works, wrong):
  Model = dataclasses.make_dataclass(
    'Model', [('size', object, fields.field(None, 'A size.', **rules))]
  )
  for value in works:
    fields.check(dataclasses.fields(Model), {'size': value})
  for value in wrong:
    with pytest.raises(ValueError, match='^model.size is '):
      fields.check(dataclasses.fields(Model), {'size': value})


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
