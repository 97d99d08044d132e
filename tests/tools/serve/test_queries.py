"""What a query asks for, and that the API's description says the same."""

import types

import pytest

server, served_model, decoder = (
  pytest.importorskip(
    f'vit_jax.tools.serve.{name}', reason='needs the extra `serve`'
  )
  for name in ('server', 'served_model', 'decoder')
)
from starlette.exceptions import HTTPException  # noqa: E402

jsonschema = pytest.importorskip('jsonschema')


PARAMETERS = (
  *('model', 'image', 'top', 'threshold', 'map', 'fusion', 'discard'),
  *('layer', 'class'),
)


def engine_of(classes=7, layers=3, explain=True, grid=(4, 6)):
  """Returns one with two models; the second has a class and a layer more."""
  first, second = (
    types.SimpleNamespace(
      class_names=[f'class {c}' for c in range(classes + more)],
      layers=layers + more,
      grid=grid,
    )
    for more in (0, 1)
  )
  return types.SimpleNamespace(
    models={'first': first, 'second': second}, explain=explain
  )


@pytest.mark.parametrize(('classes', 'top'), [(7, 5), (3, 3)])
def test_what_is_not_said_has_a_default(classes, top):
  want = 'first', None, top, 0.7, '1', 'mean', 0, None, None
  assert tuple(server.parse({}, engine_of(classes)).values()) == want
  assert server.parse(
    dict.fromkeys(PARAMETERS, ''), engine_of(classes)
  ) == server.parse({}, engine_of(classes))


def test_each_parameter_is_what_it_is_called():
  digest = 'ab' * 32
  given = {'model': 'second', 'image': digest, 'top': '8', 'threshold': '0.25'}
  given |= {'map': '0', 'fusion': 'max', 'discard': '0.5', 'layer': '3'}
  want = {'top': 8, 'threshold': 0.25, 'discard': 0.5, 'layer': 3}
  want = given | want | {'class': None}
  assert server.parse(given, engine_of()) == want
  del given['layer']
  found = server.parse(given | {'class': '7'}, engine_of())
  assert (found['class'], found['layer']) == (7, None)


def test_a_model_without_attention_has_no_layer_to_ask_for():
  with pytest.raises(HTTPException, match='layer=0 .* leave out layer'):
    server.parse({'layer': '0'}, engine_of(layers=0, grid=None))
  with pytest.raises(HTTPException, match='layer=1 .* from 0 to 0'):
    server.parse({'layer': '1'}, engine_of(layers=1))


@pytest.mark.edge
@pytest.mark.parametrize(
  ('name', 'good', 'bad'),
  [
    ('top', ['1', '7', '000007'], ['0', '8', '-1', '1.5', '0000001']),
    ('layer', ['0', '2'], ['3', '-1', '²']),
    ('class', ['0', '6'], ['7', 'cat']),
    ('threshold', ['0', '0.999'], ['1', '-0.1', 'nan', 'x']),
    ('fusion', ['mean', 'min', 'max'], ['median']),
    ('image', ['0' * 64], ['0' * 63, '0' * 65, 'A' * 64, '0' * 63 + 'g']),
    ('model', ['first', 'second'], ['third']),
  ],
)
def test_values_are_taken_up_to_their_bounds(name, good, bad):
  for value in good:
    server.parse({name: value}, engine_of())
  for value in bad:
    with pytest.raises(HTTPException) as refused:
      server.parse({name: value}, engine_of())
    assert refused.value.status_code == 400
    said = f'{name}={value} is invalid: use '
    assert refused.value.detail.startswith(said)


def test_a_map_for_a_class_is_refused_where_there_is_none():
  for engine in (engine_of(explain=None), engine_of(grid=None)):
    with pytest.raises(HTTPException, match='needs gradients') as refused:
      server.parse({'class': '0'}, engine)
    assert refused.value.status_code == 400
    assert server.parse({'layer': '0'}, engine)['layer'] == 0
  with pytest.raises(HTTPException, match='Leave out layer') as refused:
    server.parse({'class': '0', 'layer': '0'}, engine_of())
  assert refused.value.status_code == 400


def test_the_description_has_the_parameters_that_are_taken():
  predict = server.DESCRIPTION['paths']['/api/predict']['post']
  found = {x['name']: x for x in predict['parameters']}
  assert tuple(found) == PARAMETERS
  assert found['fusion']['schema']['enum'] == [*served_model.FUSIONS]
  body = predict['requestBody']['description']
  assert ', '.join(decoder.FORMATS) in body
  responses = predict['responses']
  most = f'{server.MAX_BODY_BYTES >> 20} MiB'
  assert most in responses['413']['description']
  assert f'{decoder.MAX_PIXELS:,} pixels' in responses['422']['description']
  assert {x['in'] for x in found.values()} == {'query'}
  assert all(x['description'] for x in found.values())
  schemas = {name: x['schema'] for name, x in found.items()}
  defaults = {k: x['default'] for k, x in schemas.items() if 'default' in x}
  assert sorted(defaults) == ['discard', 'fusion', 'map', 'threshold', 'top']
  asked = {k: str(x) for k, x in defaults.items()}
  assert server.parse(asked, engine_of()) == server.parse({}, engine_of())
  # Both take and refuse the same, up to what follows from the model.
  for name, schema in schemas.items():
    values = [*schema.get('enum', ()), 'x']
    if 'minimum' in schema:
      low, high = schema['minimum'], schema.get('exclusiveMaximum', 3)
      values = [low - 1, low, (low + high) // 2, high]
    for value in values:
      is_valid = jsonschema.Draft202012Validator(schema).is_valid(value)
      if schema.get('type') == 'string' and 'enum' not in schema:
        continue
      try:
        server.parse({name: str(value)}, engine_of(layers=9))
      except HTTPException:
        assert not is_valid, (name, value)
      else:
        assert is_valid, (name, value)
