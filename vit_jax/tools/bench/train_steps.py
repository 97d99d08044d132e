"""Training steps.

Our step is the step of the training loop. It flips and normalises uint8 images
on the device, and computes cross-entropy, Adam with decoupled weight decay, and
the logged norms. The batch is already on the device.

The table lists images/s, compile time and peak memory. JAX's peak is what the
compiler plans. PyTorch's peak is measured, and only on GPUs. For devices whose
peak FLOPs are known, the table lists MFU: 3 x forward FLOPs x images/s / peak
in bfloat16.

Steps run on the first device, or on --devices devices that share the batch.
images/s is the total, memory is per device.

--vs names other implementations, which run in turns with ours on the same
images:

  timm        timm's model of the same architecture with torch.compile, fused
              AdamW, and autocast if --dtype=bfloat16
  timm-eager  the same without torch.compile

If a batch does not fit into memory, the command says so and goes on with the
next combination.
"""

import functools

from vit_jax.tools.bench import speed, torch_peer

PEERS = torch_peer.peers(training=True)
bench = functools.partial(
  speed.bench, 'training', ('jax', 'flax', 'optax'), PEERS
)
