"""Image files of every kind that people have, by what is odd about them."""

import functools
import io

import numpy as np
from PIL import Image, PngImagePlugin

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
  rgb = {
    size: Image.fromarray(pixels(*size))
    for size in ((32, 48), (70, 91), (31, 400), (301, 607), (640, 500), (9, 7))
  }
  some = rgb[301, 607]
  found = {
    f'JPEG of {h} x {w}': encoded(image, 'JPEG', quality=90)
    for (h, w), image in rgb.items()
  }
  for turn in range(1, 9):
    exif = Image.Exif()
    exif[ORIENTATION] = turn
    found[f'JPEG turned {turn}'] = encoded(some, 'JPEG', exif=exif)
  exif[ORIENTATION] = 6
  found['long JPEG turned'] = encoded(rgb[31, 400], 'JPEG', exif=exif)
  for kind in ('PNG', 'TIFF'):
    found[f'{kind} turned'] = encoded(rgb[70, 91], kind, exif=exif)
  # Without EXIF, XMP says it.
  text = f'<rdf tiff:Orientation="{exif[ORIENTATION]}"/>'
  info = PngImagePlugin.PngInfo()
  info.add_itxt('XML:com.adobe.xmp', text)
  found['PNG turned by XMP'] = encoded(rgb[70, 91], 'PNG', pnginfo=info)
  for kind in ('JPEG', 'WEBP'):
    found[f'{kind} turned by XMP'] = encoded(
      rgb[70, 91], kind, xmp=text.encode()
    )
  found['progressive JPEG'] = encoded(some, 'JPEG', progressive=True)
  found['JPEG, full colour'] = encoded(some, 'JPEG', subsampling=0)
  found['grey JPEG'] = encoded(some.convert('L'), 'JPEG')
  found['CMYK JPEG'] = encoded(some.convert('CMYK'), 'JPEG')
  found['CMYK TIFF'] = encoded(some.convert('CMYK'), 'TIFF')
  grey = pixels(70, 91, 1)[..., 0].astype(np.uint16) * 257
  found['PNG of 16 bits'] = encoded(Image.fromarray(grey), 'PNG')
  found['PNG of 16 bits, one clear'] = encoded(
    Image.fromarray(grey), 'PNG', transparency=int(grey[30, 40])
  )
  found['TIFF of 16 bits'] = encoded(Image.fromarray(grey), 'TIFF')
  found['TIFF of 12 bits'] = encoded(
    Image.fromarray(grey // 16), 'TIFF', tiffinfo={281: 4095}
  )
  clear = Image.fromarray(pixels(70, 91, 4))
  found['PNG with alpha'] = encoded(clear, 'PNG')
  found['WebP with alpha'] = encoded(clear, 'WEBP', lossless=True)
  found['PNG with a palette'] = encoded(
    some.quantize(16), 'PNG', transparency=3
  )
  found['PNG of 1 bit'] = encoded(some.convert('1'), 'PNG')
  frames = [Image.fromarray(pixels(40, 60, seed=s)) for s in range(3)]
  for kind in ('GIF', 'PNG', 'WEBP'):
    found[f'animated {kind}'] = encoded(
      frames[0], kind, save_all=True, append_images=frames[1:]
    )
  found['BMP'] = encoded(some, 'BMP')
  found['WebP'] = encoded(some, 'WEBP')
  return found
