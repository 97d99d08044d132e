"""Training steps.

Ours is the step of the training loop: it flips and normalises uint8 images on
the device, and computes cross-entropy, Adam with decoupled weight decay, and
the logged norms. The batch is already on the device. The table has images/s,
compile time, memory as planned by the compiler (for torch: as measured, on
GPUs) and, if the device's peak is known, MFU: 3 x forward FLOPs x images/s
divided by the peak in bfloat16.

Steps run on the first device, or on --devices devices that share the batch.
images/s is the total, memory is per device.

--vs names peers that alternate with ours, on the same images: timm (timm's
model of the same architecture with torch.compile, fused AdamW, and autocast if
--dtype=bfloat16) and timm-eager (without torch.compile).

If a batch does not fit into memory, this is printed and the grid continues.
"""

import functools

from vit_jax.tools.bench import speed, torch_peer

PEERS = torch_peer.peers(training=True)
bench = functools.partial(
  speed.bench, 'training', ('jax', 'flax', 'optax'), PEERS
)
