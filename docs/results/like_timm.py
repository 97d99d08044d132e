"""Trains timm's ViT on CIFAR-10 with a recipe that vit_jax supports too.

  python docs/results/like_timm.py ./cifar10 --seed=0

Model, initialisation, weight average, mixup, optimizer and schedule are timm's.
The crop and RandAugment are torchvision's. docs/results/training.md has the
command for vit_jax, and the accuracies after the default number of epochs.
"""

import argparse
import time

from vit_jax.tools.bench import torch_peer

torch = torch_peer.libraries()

from timm.data import Mixup  # noqa: E402
from timm.loss import SoftTargetCrossEntropy  # noqa: E402
from timm.models import VisionTransformer  # noqa: E402
from timm.optim import create_optimizer_v2  # noqa: E402
from timm.scheduler import CosineLRScheduler  # noqa: E402
from timm.utils import ModelEmaV3  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402
from torchvision import datasets, transforms  # noqa: E402

BATCH = 128
NORMALIZE = [transforms.ToTensor(), transforms.Normalize([0.5] * 3, [0.5] * 3)]
TRAIN = [
  transforms.Resize((40, 40)),
  transforms.RandomCrop(32),
  transforms.RandomHorizontalFlip(),
  # torchvision's magnitude 9 of 30 equals vit_jax's magnitude 3 of 10.
  transforms.RandAugment(
    2, 9, interpolation=transforms.InterpolationMode.BILINEAR, fill=[128] * 3
  ),
  *NORMALIZE,
]


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('folder', help='has sub-folders train and test')
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--epochs', type=int, default=3)
  flags = parser.parse_args()
  torch.manual_seed(flags.seed)
  images = {
    split: datasets.ImageFolder(
      f'{flags.folder}/{split}', transforms.Compose(steps)
    )
    for split, steps in (('train', TRAIN), ('test', NORMALIZE))
  }
  batches = DataLoader(
    images['train'], BATCH, shuffle=True, drop_last=True, num_workers=2
  )
  model = VisionTransformer(
    img_size=32,
    patch_size=8,
    num_classes=10,
    global_pool='avg',
    class_token=False,
    embed_dim=128,
    depth=4,
    num_heads=4,
    mlp_ratio=2,
    fc_norm=False,
    weight_init='jax',
  )
  steps = flags.epochs * len(batches)
  optimizer = create_optimizer_v2(model, 'adamw', lr=2e-3, weight_decay=0.05)
  schedule = CosineLRScheduler(
    optimizer,
    steps,
    warmup_t=steps // 20,
    warmup_lr_init=0,
    warmup_prefix=True,
    t_in_epochs=False,
  )
  average = ModelEmaV3(model, decay=0.998, use_warmup=True)
  mixup = Mixup(mixup_alpha=0.2, label_smoothing=0.1, num_classes=10)
  criterion = SoftTargetCrossEntropy()
  step, started_s = 0, time.monotonic()
  for _ in range(flags.epochs):
    for batch in batches:
      pixels, labels = mixup(*batch)
      schedule.step_update(step)
      loss = criterion(model(pixels), labels)
      optimizer.zero_grad()
      loss.backward()
      torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
      optimizer.step()
      average.update(model, step)
      step += 1
      if step % 50 == 0:
        rate = step * BATCH / (time.monotonic() - started_s)
        print(f'step {step}/{steps} loss {loss:.4f} {rate:.0f} images/s')
  took_s = time.monotonic() - started_s
  average.eval()
  with torch.inference_mode():
    hits = sum(
      int((average.module(pixels).argmax(1) == labels).sum())
      for pixels, labels in DataLoader(images['test'], 500)
    )
  parameters = sum(x.numel() for x in model.parameters())
  print(
    f'accuracy {hits / len(images["test"]):.4f}, {parameters:,} parameters, '
    f'{step * BATCH / took_s:.0f} images/s'
  )


if __name__ == '__main__':
  main()
