"""Device kinds against the vendors' figures per chip."""

import types

import pytest
from jax._src.pallas.mosaic import tpu_info  # Its parser is in no public API.

from vit_jax.training import hardware


def _device(kind):
  return types.SimpleNamespace(device_kind=kind)


@pytest.mark.parametrize(
  'kind, devices_per_chip, chip_tflops, cores_per_chip',
  [
    ('TPU v2', 2, 45, 2),
    ('TPU v4', 1, 275, 2),
    ('TPU7x', 2, 2307, 2),
    ('NVIDIA A100-SXM4-80GB', 1, 312, 1),
  ],
)
def test_devices_add_up_to_the_chip(
  kind, devices_per_chip, chip_tflops, cores_per_chip
):
  device = _device(kind)
  peak = hardware.peak_flops(device)
  assert peak is not None
  assert peak * devices_per_chip == pytest.approx(chip_tflops * 1e12)
  assert hardware.cores_per_device(device) * devices_per_chip == cores_per_chip
  assert hardware.chip_flops(device) == pytest.approx(chip_tflops * 1e12)


@pytest.mark.parametrize('kind', ['TPU v99', 'NVIDIA H200 MIG 1g.18gb'])
def test_unknown_kinds_have_no_peak_and_one_core(kind):
  assert hardware.peak_flops(_device(kind)) is None
  assert hardware.cores_per_device(_device(kind)) == 1


@pytest.mark.parametrize(
  'kind', [k for k in hardware._PEAK_FLOPS if k.startswith('TPU')]
)
def test_tpu_cores_are_those_that_jax_knows(kind):
  """Also catches a misspelt kind: JAX parses what devices report."""
  version = tpu_info.chip_version_from_device_kind(kind)
  assert version is not None
  cores = hardware.cores_per_device(_device(kind))
  if version.supports_megacore:
    assert cores == version.num_physical_tensor_cores_per_chip
  else:
    assert cores == 1


@pytest.mark.parametrize(
  ('generation', 'axes', 'bidirectional_gb_per_s'),
  [
    ('v5e', (16, 16, 1), 400),
    ('v5p', (8, 8, 8), 1200),
    # Without a wrap-around link, the end of an axis has one link.
    ('v5e', (8, 16, 1), 300),
    ('v3', (1, 1, 1), 0),
  ],
)
def test_links_add_up_to_the_chip(generation, axes, bidirectional_gb_per_s):
  """Against Google's bandwidth per chip, which counts both directions."""
  one_way = hardware.TPU_CHIPS[generation].sent_bytes_per_s(axes)
  assert 2 * one_way == bidirectional_gb_per_s * 1e9


def test_every_tpu_is_told_not_to_cut_products_into_pieces():
  def told(kind, platform='tpu'):
    return hardware.compiler_options(
      types.SimpleNamespace(device_kind=kind, platform=platform)
    )

  everywhere = told('TPU v99')
  assert len(everywhere) == 2 and not any(everywhere.values())
  for kind in hardware._COMPILER_OPTIONS:
    assert kind in ('', *hardware._PEAK_FLOPS)
    assert everywhere.items() <= told(kind).items()
  assert told('TPU v5 lite')['xla_tpu_scoped_vmem_limit_kib'] == 32768
  assert told('cpu', 'cpu') == {}
