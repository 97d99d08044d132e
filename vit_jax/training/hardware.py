"""Facts of JAX devices: peak speed, cores, and compiler options."""

import dataclasses
from collections.abc import Sequence

import jax

_TFLOP = 1e12

_PEAK_FLOPS = {
  # One JAX device is one of a chip's two cores: half of the chip's peak.
  'TPU v2': 22.5 * _TFLOP,
  'TPU v3': 61.5 * _TFLOP,
  'TPU7x': 1153.5 * _TFLOP,
  # One JAX device is the whole chip.
  'TPU v4': 275 * _TFLOP,
  'TPU v5 lite': 197 * _TFLOP,
  'TPU v5e': 197 * _TFLOP,
  'TPU v5': 459 * _TFLOP,
  'TPU v5p': 459 * _TFLOP,
  'TPU v6 lite': 918 * _TFLOP,
  'TPU v6e': 918 * _TFLOP,
  # Full names: a prefix would also match a MIG slice, which is slower.
  'NVIDIA A100-SXM4-40GB': 312 * _TFLOP,
  'NVIDIA A100-SXM4-80GB': 312 * _TFLOP,
  'NVIDIA A100-PCIE-40GB': 312 * _TFLOP,
  'NVIDIA A100 80GB PCIe': 312 * _TFLOP,
  'NVIDIA H100 80GB HBM3': 989 * _TFLOP,
  'NVIDIA H100 PCIe': 756 * _TFLOP,
  'NVIDIA H100 NVL': 835 * _TFLOP,
  'NVIDIA H200': 989 * _TFLOP,
  'NVIDIA H200 NVL': 835 * _TFLOP,
  'NVIDIA GH200 480GB': 989 * _TFLOP,
  'NVIDIA B200': 2250 * _TFLOP,
  'NVIDIA L4': 121 * _TFLOP,
  'NVIDIA L40S': 362 * _TFLOP,
}


# Compiler options by kind of device; '' means all TPUs.
_COMPILER_OPTIONS: dict[str, dict[str, bool | int]] = {
  # From v4 on, the compiler by default splits matrix products with gathered or
  # scattered arrays into pieces, to overlap products and communication. With
  # gather='step', kernels are gathered once, so there is nothing to overlap,
  # and the pieces about halve the speed (see docs/results/tpu.md).
  '': {
    'xla_tpu_enable_windowed_einsum_for_all_gather': False,
    'xla_tpu_enable_windowed_einsum_for_reduce_scatter': False,
  },
  # More VMEM than the default of 16 MiB allows products with larger tiles. It
  # saves 4 % for two layers of L/16 on v5e, and 4 % for all 24 layers on v5p.
  # Larger values are slower.
  'TPU v5 lite': {'xla_tpu_scoped_vmem_limit_kib': 32 * 1024},
  'TPU v5': {'xla_tpu_scoped_vmem_limit_kib': 24 * 1024},
}


def compiler_options(device: jax.Device) -> dict[str, bool | int]:
  """Returns the XLA options for training steps on a kind of device."""
  if device.platform != 'tpu':
    return {}
  return _COMPILER_OPTIONS[''] | _COMPILER_OPTIONS.get(device.device_kind, {})


def peak_flops(device: jax.Device) -> float | None:
  """Returns the peak dense bfloat16 FLOP/s of a JAX device, or None if unknown.

  TPU figures are from Google's pages, see `TPU_CHIPS`, divided by the JAX
  devices of a chip. NVIDIA figures are from the data sheets
  (nvidia.com/en-us/data-center), without sparsity: most sheets print twice as
  much. Some TPUs have two entries: the kind that the device reports, and its
  alias in JAX's own list (`jax/_src/pallas/mosaic/tpu_info.py`).
  """
  return _PEAK_FLOPS.get(device.device_kind)


def cores_per_device(device: jax.Device) -> int:
  """Returns the cores of one JAX device, the unit of "core-days".

  A core is a TPU's TensorCore, as in the tables of the paper, or one whole
  GPU or CPU device. The two cores of a TPU v4 or v5p run as one device
  ("megacore"); on other TPUs each core is a device.
  """
  return 2 if device.device_kind in ('TPU v4', 'TPU v5', 'TPU v5p') else 1


def chip_flops(device: jax.Device) -> float:
  """Returns the peak dense bfloat16 FLOP/s of a device's TPU chip."""
  kind = device.device_kind
  return _PEAK_FLOPS[kind] * (2 if kind in ('TPU v2', 'TPU v3', 'TPU7x') else 1)


@dataclasses.dataclass(frozen=True)
class TpuChip:
  """Facts of a chip of a TPU generation.

  Attributes:
    clock_hz: clock rate, which the compiler's cycle estimates refer to.
    hbm_gib: memory of the chip.
    link_bytes_per_s: bandwidth of one link, one way.
    ring: minimum length, in chips, of an axis that is a ring. With 3D links,
      the axes are rings if all their lengths are multiples of it.
    is_3d: whether a chip has six links instead of four.
    network_bytes_per_s: a chip's share of its host's network, one way; 0 if the
      figure is not published.
  """

  clock_hz: float
  hbm_gib: float
  link_bytes_per_s: float
  ring: int
  is_3d: bool = False
  network_bytes_per_s: float = 0

  def sent_bytes_per_s(self, axes: Sequence[int]) -> float:
    """Returns the total bandwidth, one way, of the chip with the fewest links.

    `axes` has the number of chips along each axis. A chip has two links along a
    ring. At the end of any other axis it has one.
    """
    if self.is_3d:
      is_ring = [all(n % self.ring == 0 for n in axes)] * len(axes)
    else:
      is_ring = [n >= self.ring for n in axes]
    links = sum(
      (2 if ring else 1) for n, ring in zip(axes, is_ring, strict=True) if n > 1
    )
    return links * self.link_bytes_per_s


# Facts by the generation in a topology's name, such as v5e in v5e:4x4.
# Clocks: for v2 and v3, Norrie et al., "The design process for Google's
# training chips: TPUv2 and TPUv3", 2021; for v4, Jouppi et al., ISCA 2023; for
# newer chips, the rate at which all multipliers reach the peak above.
# Memory and links: Google's pages under
# https://cloud.google.com/tpu/docs/system-architecture-tpu-vm. A link has half
# of a chip's bidirectional bandwidth, divided by the number of its links. v2
# and v3 have 496 and 656 Gbit/s per link (Norrie et al.).
# Rings: an axis is a ring at the pod's full length of 16 chips (v3: 32). With
# 3D links, it is a ring if the slice consists of cubes of 4 x 4 x 4 chips (the
# same pages, and Jouppi et al.).
# Network: for the 8 chips of a host, v5e has two adapters of 100 Gbit/s, and
# v6e four of 200 Gbit/s. v5p has 50 Gbit/s per chip. (Sources:
# https://cloud.google.com/tpu/docs/v6e and .../v5p.)
TPU_CHIPS = {
  'v2': TpuChip(700e6, 16, 62e9, 16),
  'v3': TpuChip(940e6, 32, 82e9, 32),
  'v4': TpuChip(1050e6, 32, 50e9, 4, is_3d=True),
  'v5e': TpuChip(1500e6, 16, 50e9, 16, network_bytes_per_s=3.125e9),
  'v5p': TpuChip(1750e6, 95, 100e9, 4, is_3d=True, network_bytes_per_s=6.25e9),
  'v6e': TpuChip(1750e6, 32, 100e9, 16, network_bytes_per_s=12.5e9),
  'tpu7x': TpuChip(2200e6, 192, 100e9, 4, is_3d=True),
}
