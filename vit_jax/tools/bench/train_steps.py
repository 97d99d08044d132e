"""Training steps.

Our code runs the step of the training loop. The step flips and normalises uint8
images on the device, and computes cross-entropy, Adam with decoupled weight
decay, and the logged norms. The batch is already on the device.

The table lists images/s, compile time and peak memory. For JAX, the compiler
predicts the peak. For PyTorch it is measured, on GPUs only. If the peak FLOP/s
of the device is known, our row lists MFU: 3 x forward FLOPs x images/s,
divided by the bfloat16 peak of all devices in use.

Steps run on the first device, or on --devices devices that share the batch.
images/s is the total over devices; memory is per device.

--vs names other implementations, which run in turns with ours on the same
images:

  timm        timm's model of the same architecture with torch.compile, fused
              AdamW, and autocast if --dtype=bfloat16
  timm-eager  the same without torch.compile

If a batch does not fit into memory, the command prints a message and leaves the
implementation out.
"""

import functools

from vit_jax.tools.bench import speed, torch_peer

PEERS = torch_peer.peers(training=True)
bench = functools.partial(
  speed.bench, 'training', ('jax', 'flax', 'optax'), PEERS
)
