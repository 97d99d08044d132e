"""Trains on a folder of photos in ten minutes: the config to begin with.

  python -m vit_jax.main --config=configs/own.py:./photos --workdir=runs/own
  python -m vit_jax.main --config=configs/own.py:./photos,minutes=3 ...
  python -m vit_jax.main --config=configs/own.py:./photos,augreg/s16-224 ...

The first value is a folder with a sub-folder of photos for each class. The
second value is a checkpoint to start from: the name of a published checkpoint,
a file or a workdir. With a few thousand photos or fewer, a published checkpoint
usually gives a better model.

When training starts, the run chooses image size, augmentation, optimizer and
number of steps from the photos, the checkpoint and the speed of the machine,
and prints them. Fields that you set keep their values, as in
--config.data.image_size=96. With a checkpoint and 1,000 training photos or
more, a tenth of them becomes a validation split.

docs/guides/own_photos.md says what accuracy to expect.
"""

from vit_jax import config as config_lib
from vit_jax import own


def get_config(argument='./photos'):
  (folder, init), pairs = config_lib.parse_argument(argument, ['./photos', ''])
  config = own.config(folder, init, pairs.pop('minutes', 10))
  config_lib.override(config, pairs)
  return config
