"""Where the rules put every array, and meshes that cannot be."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.models import variants
from vit_jax.training import sharding

SIZE = (16, 16)
FIELDS = {
  'patch_size': 4,
  'width': 32,
  'depth': 2,
  'mlp_dim': 64,
  'heads': 4,
  'representation_size': 16,
}
MESH = {'data': 2, 'fsdp': 2, 'tensor': 2}

# The placement of every kind of parameter: kernels over fsdp along their input
# (queries, keys, values, first MLP layer) or output (their counterparts), and
# over tensor along heads and MLP; biases of those along with them.
WANT = {
  r'cls': P(),
  r'embedding/kernel': P(None, None, None, 'fsdp'),
  r'embedding/bias': P(),
  r'Transformer/posembed_input/pos_embedding': P(None, None, 'fsdp'),
  r'Transformer/encoderblock_\d/LayerNorm_[02]/(scale|bias)': P(),
  r'.*/MultiHeadDotProductAttention_1/(query|key|value)/kernel': P(
    'fsdp', 'tensor', None
  ),
  r'.*/MultiHeadDotProductAttention_1/(query|key|value)/bias': P(
    'tensor', None
  ),
  r'.*/MultiHeadDotProductAttention_1/out/kernel': P('tensor', None, 'fsdp'),
  r'.*/MultiHeadDotProductAttention_1/out/bias': P(),
  r'.*/MlpBlock_3/Dense_0/kernel': P('fsdp', 'tensor'),
  r'.*/MlpBlock_3/Dense_0/bias': P('tensor'),
  r'.*/MlpBlock_3/Dense_1/kernel': P(('tensor', 'fsdp'), None),
  r'.*/MlpBlock_3/Dense_1/bias': P(),
  r'Transformer/encoder_norm/(scale|bias)': P(),
  r'pre_logits/kernel': P(None, 'fsdp'),
  r'pre_logits/bias': P(),
  r'head/kernel': P('fsdp', None),
  r'head/bias': P(),
}


def shapes(**fields):
  model = variants.build(num_classes=10, image_size=SIZE, **(FIELDS | fields))
  return jax.eval_shape(
    lambda key: variants.init(model, key, SIZE), jax.random.key(0)
  )


def specs(tree, sizes=MESH, devices=None):
  """Returns the PartitionSpec of every array by its path."""
  mesh = sharding.make_mesh(sizes, devices)
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): s.spec
    for path, s in jax.tree_util.tree_leaves_with_path(
      sharding.tree_shardings(tree, mesh)
    )
  }


def same(spec, other, ndim):
  """Whether two specifications mean the same; missing axes are None."""

  def axes(spec):
    one = [x[0] if isinstance(x, tuple) and len(x) == 1 else x for x in spec]
    return one + [None] * (ndim - len(spec))

  return axes(spec) == axes(other)


def wanted(name):
  matches = [w for pattern, w in WANT.items() if re.fullmatch(pattern, name)]
  assert len(matches) == 1, name
  return matches[0]


def leaves(tree):
  return {
    jax.tree_util.keystr(path, simple=True, separator='/'): x
    for path, x in jax.tree_util.tree_leaves_with_path(tree)
  }


def test_every_parameter_lies_where_it_is_documented():
  tree = shapes()
  for name, x in leaves(tree).items():
    assert same(specs(tree)[name], wanted(name), x.ndim), name


def test_stacked_layers_are_placed_like_the_layers():
  """The layer axis comes first and is never split."""
  tree, unrolled = shapes(scan=True), specs(shapes())
  stacked = {n: x for n, x in leaves(tree).items() if '/encoderblock/' in n}
  assert len(stacked) == 16
  for name, x in stacked.items():
    layer = name.replace('/encoderblock/', '/encoderblock_0/')
    want = P(None, *unrolled[layer])
    assert same(specs(tree)[name], want, x.ndim), name


LAYER = 'Transformer/encoderblock_0/'
FSDP, BOTH = ('fsdp',), ('fsdp', 'data')


@pytest.mark.parametrize(
  ('width', 'rows', 'lanes'),
  # A tile has 16 rows and 128 lanes: quarters of 32 have 8 rows.
  [(32, FSDP, 'fsdp'), (64, BOTH, 'fsdp'), (512, BOTH, BOTH)],
)
def test_data_splits_further_what_fsdp_splits_down_to_a_tile(
  width, rows, lanes
):
  tree = shapes(width=width, mlp_dim=width, representation_size=0)
  want = {
    'embedding/kernel': P(None, None, None, lanes),
    'Transformer/posembed_input/pos_embedding': P(None, None, lanes),
    f'{LAYER}MultiHeadDotProductAttention_1/key/kernel': P(
      rows, 'tensor', None
    ),
    f'{LAYER}MultiHeadDotProductAttention_1/out/kernel': P(
      'tensor', None, lanes
    ),
    f'{LAYER}MlpBlock_3/Dense_0/kernel': P(rows, 'tensor'),
    f'{LAYER}MlpBlock_3/Dense_1/kernel': P(('tensor', *rows), None),
    f'{LAYER}MlpBlock_3/Dense_1/bias': P(),
    'Transformer/encoder_norm/scale': P(),
    'head/kernel': P(rows, None),
  }
  got = specs(tree, {'data': 2, 'fsdp': 2, 'tensor': 1}, jax.devices()[:4])
  for name, spec in want.items():
    assert same(got[name], spec, leaves(tree)[name].ndim), name


def test_gradients_are_scattered_over_fsdp_before_data():
  """Over both at once TPUs would sum them whole."""
  mesh = sharding.make_mesh(
    {'data': 2, 'fsdp': 2, 'tensor': 1}, jax.devices()[:4]
  )
  tree = {'head': {'kernel': jax.ShapeDtypeStruct((64, 10), jnp.float32)}}
  program = jax.make_jaxpr(lambda x: sharding.scatter(x, mesh))(tree)
  found = [
    equation.params['sharding'].spec
    for equation in program.eqns
    if equation.primitive.name == 'sharding_constraint'
  ]
  assert found == [P('fsdp', None), P(BOTH, None)]


def test_data_alone_splits_nothing():
  for name, spec in specs(
    shapes(width=512), {**MESH, 'fsdp': 1, 'data': 4}
  ).items():
    assert 'data' not in jax.tree.leaves([*spec]), name


def test_optimizer_state_lies_where_its_parameters_do():
  tree = shapes()
  state = {
    'opt_state': jax.eval_shape(optax.adam(1.0).init, tree),
    'average': tree,
  }
  params, got = specs(tree), specs(state)
  found = 0
  for path, spec in got.items():
    matching = [n for n in params if path.endswith('/' + n)]
    if matching:
      found += 1
      assert spec == params[max(matching, key=len)], path
    else:
      assert spec == P(), path
  assert found == 3 * len(params)


def without_fsdp(spec):
  names = ((axes,) if isinstance(axes, str) else axes or () for axes in spec)
  return P(*(tuple(n for n in each if n != 'fsdp') or None for each in names))


def test_what_is_gathered_is_split_over_tensor_alone():
  """And what is scattered lies where the parameters do.

  Left split, it would be gathered again by each layer and part of a batch.
  """
  mesh, tree = sharding.make_mesh(MESH), shapes()
  params = jax.device_put(
    jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), tree),
    sharding.tree_shardings(tree, mesh),
  )
  gathered = jax.jit(lambda x: sharding.gather(x, mesh))(params)
  scattered = jax.jit(lambda x: sharding.scatter(x, mesh))(gathered)
  for found, spec_of in (
    (gathered, lambda name: without_fsdp(wanted(name))),
    (scattered, wanted),
  ):
    for name, x in leaves(found).items():
      want = NamedSharding(mesh, spec_of(name))
      assert x.sharding.is_equivalent_to(want, x.ndim), name


def test_axes_that_do_not_divide_are_left_out_for_that_array_alone():
  tree = shapes(heads=1)
  got = specs(tree)
  query = 'Transformer/encoderblock_0/MultiHeadDotProductAttention_1/query'
  assert same(got[f'{query}/kernel'], P('fsdp', None, None), 3)
  assert same(got[f'{query}/bias'], P(), 2)
  dense = 'Transformer/encoderblock_0/MlpBlock_3/Dense_0/kernel'
  assert got[dense] == P('fsdp', 'tensor')
  odd = specs({'head': {'kernel': jax.ShapeDtypeStruct((33, 10), jnp.float32)}})
  assert same(odd['head/kernel'], P(), 2)
  # Of six rows each axis leaves three, and both together would leave 1.5.
  rows = {'Dense_1': {'kernel': jax.ShapeDtypeStruct((6, 32), jnp.float32)}}
  assert same(specs(rows)['Dense_1/kernel'], P('tensor', None), 2)


def test_arrays_smaller_than_their_rule_are_not_refused():
  """A name may end like a kernel's without being one."""
  x = jax.ShapeDtypeStruct((), jnp.float32)
  assert specs({'step': {'kernel': x}}) == {'step/kernel': P()}


@pytest.mark.parametrize(
  ('sizes', 'shape'),
  [
    ((-1, -1, 1, 1), (1, 8, 1, 1)),
    ((1, 2, 2, -1), (1, 2, 2, 2)),
    ((2, -1, 2, 1), (2, 2, 2, 1)),
  ],
)
def test_meshes_fill_up(sizes, shape):
  mesh = sharding.make_mesh(dict(zip(sharding.AXES, sizes, strict=True)))
  assert mesh.axis_names == ('slice', 'data', 'fsdp', 'tensor')
  assert mesh.devices.shape == shape
  assert sorted(d.id for d in mesh.devices.flat) == list(range(8))


@pytest.mark.parametrize(
  ('kind', 'cores', 'in_order'),
  [('TPU v4', (0, 1, 0, 1), True), ('TPU v3', (0, 1, 0, 1), False)],
)
def test_cores_of_v4_one_by_one_stay_in_their_order(
  monkeypatch, kind, cores, in_order
):
  """As topologies have them that are compiled for; JAX places all others."""
  devices = [
    types.SimpleNamespace(platform='tpu', device_kind=kind, core_on_chip=core)
    for core in cores
  ]
  asked, made = [], []

  def create(shape, devices, **options):
    asked.append(options)
    return np.asarray(devices[::-1]).reshape(shape)

  monkeypatch.setattr(sharding.mesh_utils, 'create_device_mesh', create)
  monkeypatch.setattr(
    sharding, 'Mesh', lambda *args, axis_types: made.append((*args, axis_types))
  )
  sharding.make_mesh({'data': 2, 'fsdp': -1, 'tensor': 1}, devices)
  want = devices if in_order else devices[::-1]
  ((placed, axes, types_of_axes),) = made
  assert placed.shape == (1, 2, 2, 1) and list(placed.flat) == want
  # What lies where is for the partitioner to find out.
  assert axes == sharding.AXES
  assert types_of_axes == 4 * (jax.sharding.AxisType.Auto,)
  # An axis may be a part of one of the topology.
  wanted = [] if in_order else [{'allow_split_physical_axes': True}]
  assert asked == wanted


@pytest.mark.parametrize(
  ('width', 'tensor', 'shape'),
  [
    (1024, 1, (1, 2, 4, 1)),
    (1024, 2, (1, 1, 4, 2)),
    (32, 2, (1, 2, 2, 2)),
    (1026, 1, (1, 4, 2, 1)),
    (20, 1, (1, 8, 1, 1)),
  ],
)
def test_data_and_fsdp_share_what_there_is(width, tensor, shape):
  """As many along fsdp as leave every device 16 whole rows of D x D.

  And no more than half of eight devices.
  """
  sizes = {'data': -1, 'fsdp': -1, 'tensor': tensor}
  assert sharding.make_mesh(sizes, width=width).devices.shape == shape


@pytest.mark.parametrize(
  ('sizes', 'message'),
  [
    ((1, 2, -1, -1), 'Set one of .* to -1'),
    ((1, 0, -1, 8), 'Sizes must be -1 or at least 1'),
    ((1, -1, 3, 1), 'does not multiply to the 8 devices'),
    ((2, 8, 1, 1), 'does not multiply to the 4 devices of each of 2 slices'),
  ],
)
def test_meshes_that_cannot_be_are_refused(sizes, message):
  named = dict(zip(sharding.AXES[1:], sizes[1:], strict=True))
  with pytest.raises(ValueError, match=message) as e:
    sharding.make_mesh(named | {'slice': sizes[0]})
  assert str(named) in str(e.value)


def test_tpu_slices_are_the_first_axis(monkeypatch):
  monkeypatch.setattr(sharding, 'Mesh', lambda placed, *_, **__: placed)
  devices = [
    types.SimpleNamespace(
      platform='tpu',
      device_kind='TPU v5 lite',
      core_on_chip=0,
      slice_index=i % 2,
      coords=(i // 2 % 2, i // 4, 0),
    )
    for i in range(8)
  ]
  sizes = {'data': -1, 'fsdp': 2, 'tensor': 1}
  placed = sharding.make_mesh(sizes, devices)
  assert placed.shape == (2, 2, 2, 1)
  for index, inside in enumerate(placed):
    assert {device.slice_index for device in inside.flat} == {index}
  with pytest.raises(ValueError, match=r'mesh\.slice is 4.*slices: 2.*-1'):
    sharding.make_mesh(sizes | {'slice': 4}, devices)


@pytest.mark.parametrize('count', [0, 3])
def test_devices_that_slices_do_not_share_evenly_are_refused(count):
  sizes = {'slice': count, 'data': -1, 'fsdp': 1, 'tensor': 1}
  with pytest.raises(
    ValueError, match=f'mesh.slice is {count}, which does not fit 8'
  ):
    sharding.make_mesh(sizes)


def test_state_is_whole_in_every_slice():
  """Only gradients and metrics cross between slices."""
  mesh = sharding.make_mesh({'slice': 2, 'data': 2, 'fsdp': 2, 'tensor': 1})
  tree = shapes(width=64, mlp_dim=128)
  for placed in jax.tree.leaves(sharding.tree_shardings(tree, mesh)):
    assert 'slice' not in jax.tree.leaves(tuple(placed.spec))


def test_batches_are_split_over_all_axes_but_tensor():
  mesh = sharding.make_mesh(MESH)
  image = np.arange(8 * 3).reshape(8, 3)
  batch = sharding.global_batch({'image': image, 'label': image[:, 0]}, mesh)
  for name in ('image', 'label'):
    x = batch[name]
    assert len(x.addressable_shards) == 8
    assert {s.data.shape[0] for s in x.addressable_shards} == {2}
  np.testing.assert_array_equal(batch['image'], image)


@pytest.mark.parametrize(
  ('shape', 'process_of', 'shares'),
  [
    # The processes of 8 devices in the order of the mesh, and what each gives.
    ((1, 2, 2, 2), '00112233', [(0, 4), (1, 4), (2, 4), (3, 4)]),
    ((2, 1, 1, 4), '00112233', [(0, 2), (0, 2), (1, 2), (1, 2)]),
    ((1, 4, 1, 2), '02020202', [(0, 1), None, (0, 1)]),
  ],
)
def test_processes_that_share_rows_give_the_same_part(
  shape, process_of, shares, monkeypatch
):
  devices = np.array(
    [types.SimpleNamespace(process_index=int(i)) for i in process_of]
  ).reshape(shape)
  mesh = types.SimpleNamespace(
    devices=devices,
    size=8,
    shape=dict(zip(sharding.AXES, shape, strict=True)),
  )
  for process, share in enumerate(shares):
    if share:
      monkeypatch.setattr(jax, 'process_index', lambda p=process: p)
      assert sharding.batch_share(mesh) == share


def test_processes_that_share_some_rows_are_refused(monkeypatch):
  devices = [types.SimpleNamespace(process_index=i // 3) for i in range(12)]
  mesh = types.SimpleNamespace(
    devices=np.array(devices).reshape(1, 3, 2, 2),
    size=12,
    shape={'slice': 1, 'data': 3, 'fsdp': 2, 'tensor': 2},
  )
  with pytest.raises(
    ValueError, match='tensor is 2, and each of the 4 proc.*3'
  ):
    sharding.batch_share(mesh)


@pytest.mark.parametrize('each', [True, False])
def test_arrays_of_several_processes_are_placed_if_they_are_alike(
  monkeypatch, each
):
  mesh = sharding.make_mesh({'data': 4, 'fsdp': 2, 'tensor': 1})
  rng = np.random.default_rng(0)
  tree = {'a': rng.random((4, 6), np.float32), 'b': np.arange(3)}
  where = sharding.replicated(mesh)
  if each:
    where = {'a': NamedSharding(mesh, P('fsdp')), 'b': where}
  compared = []

  def refuse_unlike(see, refusal):
    compared.append((tuple(see()), refusal))

  monkeypatch.setattr(sharding.processes, 'refuse_unlike', refuse_unlike)
  alone = sharding.place(tree, where)  # which there is nothing to compare to
  monkeypatch.setattr(jax, 'process_count', lambda: 2)
  together = sharding.place(tree, where)
  for name, x in tree.items():
    for placed in (alone[name], together[name]):
      np.testing.assert_array_equal(placed, x)
      want = where[name] if each else where
      assert placed.sharding.is_equivalent_to(want, x.ndim)
  # One bit of one number is another checkpoint.
  tree['a'][3, 5] = np.nextafter(tree['a'][3, 5], 2)
  sharding.place(tree, where)
  (first, refusal), (second, _) = compared
  assert len(first) == len(second) == 2
  assert first[0] != second[0] and first[1] == second[1]
  assert 'start from different parameters' in refusal


def test_each_device_works_off_its_own_rows():
  """Of rows that cannot be shared evenly, or on no mesh, one has all."""
  mesh = sharding.make_mesh({'data': 2, 'fsdp': 4, 'tensor': 1})
  shapes = []

  def total(x, y):
    shapes.append((x.shape, y.shape))
    zeros = jnp.zeros(len(y), y.dtype)
    return x + jax.lax.fori_loop(0, 3, lambda i, z: z + y[:, i], zeros)

  function = sharding.on_each_device(total)

  def of(n):
    shapes.clear()
    x, y = np.arange(n), np.arange(3 * n).reshape(n, 3)
    rows = sharding.place((x, y), sharding.replicated(mesh))
    np.testing.assert_array_equal(jax.jit(function)(*rows), x + y.sum(axis=1))
    return shapes[0]

  assert of(8) == ((8,), (8, 3))
  with sharding.activations(mesh):
    assert of(16) == ((2,), (2, 3))
    assert of(4) == ((4,), (4, 3))
