"""Image files of the kinds that people have, by what is odd about them."""

import functools
import io

import numpy as np
from PIL import Image

ORIENTATION = 0x0112


def pixels(height, width, channels=3, seed=0):
  """Returns uint8 noise with something coarse beneath it."""
  rng = np.random.default_rng(seed)
  coarse = rng.integers(0, 256, (4, 5, channels), np.uint8)
  big = np.asarray(coarse.repeat(-(-height // 4), 0).repeat(-(-width // 5), 1))
  fine = rng.integers(-30, 31, (height, width, channels))
  return np.clip(big[:height, :width] + fine, 0, 255).astype(np.uint8)


def encoded(image, kind, **options):
  """Returns a file's bytes."""
  file = io.BytesIO()
  image.save(file, kind, **options)
  return file.getvalue()


@functools.cache
def every_kind():
  """Returns files by name."""
  sizes = ((32, 48), (70, 91), (31, 400), (301, 607), (9, 7))
  rgb = {size: Image.fromarray(pixels(*size)) for size in sizes}
  some = rgb[301, 607]
  found = {
    f'JPEG of {h} x {w}': encoded(image, 'JPEG', quality=90)
    for (h, w), image in rgb.items()
  }
  exif = Image.Exif()
  exif[ORIENTATION] = 6
  found['JPEG turned 6'] = encoded(some, 'JPEG', exif=exif)
  found['long JPEG turned'] = encoded(rgb[31, 400], 'JPEG', exif=exif)
  found['PNG turned'] = encoded(rgb[70, 91], 'PNG', exif=exif)
  found['progressive JPEG'] = encoded(some, 'JPEG', progressive=True)
  found['grey JPEG'] = encoded(some.convert('L'), 'JPEG')
  found['CMYK JPEG'] = encoded(some.convert('CMYK'), 'JPEG')
  grey = pixels(70, 91, 1)[..., 0].astype(np.uint16) * 257
  for kind in ('PNG', 'TIFF'):
    found[f'{kind} of 16 bits'] = encoded(Image.fromarray(grey), kind)
  clear = Image.fromarray(pixels(70, 91, 4))
  found['PNG with alpha'] = encoded(clear, 'PNG')
  found['PNG with a palette'] = encoded(
    some.quantize(16), 'PNG', transparency=3
  )
  frames = [Image.fromarray(pixels(40, 60, seed=s)) for s in range(3)]
  for kind in ('GIF', 'WEBP'):
    found[f'animated {kind}'] = encoded(
      frames[0], kind, save_all=True, append_images=frames[1:]
    )
  found['BMP'] = encoded(some, 'BMP')
  return found
