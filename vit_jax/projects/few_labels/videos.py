"""Videos, whose frames are records: files, folders of frames, made ones.

Frames lie video after video in their order, so that a frame is read as every
other image is. A shot is a stretch of neighbouring frames.
"""

import collections
import dataclasses
import logging
import os
import pathlib
import re

import cv2
import numpy as np
from ml_collections import ConfigDict

from vit_jax.data import (
  bad_images,
  cores,
  decode,
  folder,
  image_files,
  transforms,
)
from vit_jax.data.source import Record, RecordsByIndex, Source

_log = logging.getLogger(__name__)

# Of a made video: shots, frames of each, and the least side in pixels.
_SHOTS, _FRAMES, _SIDE = 3, 8, 16
# Extensions of video files, and frames that one may lack at its end.
FILES = ('.mp4', '.m4v', '.mov', '.avi', '.mkv', '.webm')
_MOST_LACKING = 10
# How far a made video goes: across and down in shares of the side, turned by
# degrees, and grown by the logarithm of the size; and which change in a shot.
_MOST = (0.25, 0.25, 30.0, 0.3)
_SHOT_KINDS = ((0, 1), (2,), (3,))


@dataclasses.dataclass(frozen=True)
class Videos:
  """Videos of any length.

  Attributes:
    frames: of all of them.
    edges: int64 [V + 1], video v has the frames from edges[v] to before
      edges[v + 1].
  """

  frames: RecordsByIndex
  edges: np.ndarray

  def __len__(self) -> int:
    return len(self.edges) - 1

  def clip(
    self,
    video: int,
    shots: int,
    frames: int,
    length: int,
    rng: np.random.Generator,
  ) -> np.ndarray:
    """Returns the frames [shots, frames] of a part of a video, in order.

    Each of as many equal parts of the video has a shot, at most `length`
    neighbouring frames anywhere in it, of which `frames` are drawn.
    """
    first, end = self.edges[video : video + 2]
    bounds = first + (end - first) * np.arange(shots + 1) // shots
    found = []
    for low, high in zip(bounds[:-1], bounds[1:], strict=True):
      within = min(length, high - low)
      low = low + rng.integers(high - low - within + 1)
      found.append(low + np.sort(rng.choice(within, frames, replace=False)))
    return np.stack(found)

  def check(self, shots: int, frames: int) -> None:
    """Refuses videos that are too short for clips.

    Raises:
      ValueError: naming the shortest.
    """
    lengths = np.diff(self.edges)
    shortest = int(np.argmin(lengths))
    if lengths[shortest] < shots * frames:
      name = self.frames[int(self.edges[shortest])]['name']
      raise ValueError(
        f'The video that begins with {name} has {lengths[shortest]} frames: '
        f'objective.shots={shots} of objective.frames={frames} take '
        f'{shots * frames}. Remove it, or take fewer.'
      )


def open_videos(path: str, data: ConfigDict) -> Videos:
  """Opens the videos of a folder, or makes some of images; frames are checked.

  Args:
    path: of a folder with a folder of frames for each video, which come in the
      order of their names, or of video files. Empty for a made video of every
      image of `data`.
    data: as `config.data`.

  Raises:
    ValueError: if there is none, or frames or images are unreadable.
    FileNotFoundError: likewise.
  """
  if not path:
    images = bad_images.open_checked(data, data.split)
    edges = np.arange(len(images) + 1) * (_SHOTS * _FRAMES)
    return Videos(MovingImages(images), edges)
  root = pathlib.Path(os.path.expanduser(path))
  if not root.is_dir():
    raise FileNotFoundError(
      f'no folder {root}; give one with video files, or with a '
      'folder of frames for each video'
    )
  video_files = _video_files(root)
  if image_files.sub_folders(root) and video_files:
    raise ValueError(
      f'{root} has video files, such as {os.path.basename(video_files[0])}, '
      'and folders of frames: give one with either'
    )
  if not image_files.sub_folders(root):
    files = VideoFiles(root, data.on_bad_image == 'skip')
    return Videos(files, files.edges)
  frames = bad_images.checked(FrameFolders(root), data.on_bad_image)
  videos = frames.labels()  # type: ignore[attr-defined]
  # None of those of which no frame can be read.
  starts = np.unique(videos, return_index=True)[1]
  return Videos(frames, np.append(starts, len(frames)))


class FrameFolders(folder.Folder):
  """The frames of a folder's folders, each a video, in the order of names."""

  def __init__(self, root: pathlib.Path):
    """Lists them.

    Raises:
      ValueError: there is no folder of frames, or one without frames.
    """
    self.class_names = image_files.sub_folders(root)
    files = self._list(root, collections.Counter())
    # Frame 10 comes after frame 9, whether or not that is called 09.
    files.sort(key=lambda file: (file[1], _with_numbers(file[0])))
    self._paths = [path for path, _ in files]
    self._labels = [video for _, video in files]


class VideoFiles:
  """The frames of a folder's video files, each decoded when it is asked for.

  Attributes:
    edges: as in `Videos`, in the order of the files' names.
  """

  def __init__(self, root: pathlib.Path, skip: bool):
    """Looks how long they are, and whether their last frame can be decoded.

    Raises:
      ValueError: there is none, or one is unreadable and may not be skipped.
    """
    paths = _video_files(root)
    if not paths:
      raise ValueError(
        f'{root} has neither folders of frames nor video files '
        f'({", ".join(FILES)})'
      )
    bar = cores.progress('Checking videos', len(paths), 'videos')
    lengths = list(
      cores.in_threads(
        lambda i: _readable_frames(paths[i]), range(len(paths)), bar
      )
    )
    bad = [p for p, n in zip(paths, lengths, strict=True) if not n]
    if bad and (not skip or len(bad) == len(paths)):
      raise ValueError(
        f'{len(bad)} of {len(paths)} videos cannot be decoded: '
        f'{", ".join(bad[:5])}. Repair or remove them, or train without them: '
        '--config.data.on_bad_image=skip'
      )
    if bad:
      _log.warning('Left out, they cannot be decoded: %s', ', '.join(bad))
    self._paths = [p for p in paths if p not in bad]
    self.edges = np.cumsum([0, *(n for n in lengths if n)])

  def __len__(self) -> int:
    return int(self.edges[-1])

  def __getitem__(self, index: int) -> Record:
    video = int(np.searchsorted(self.edges, index, 'right')) - 1
    path, frame = self._paths[video], index - int(self.edges[video])
    image = _frame(path, frame)
    if image is None:
      raise decode.UnreadableImage(path, f'frame {frame} cannot be decoded')
    return {'image': image, 'name': f'{path}, frame {frame}'}


def _video_files(root: pathlib.Path) -> list[str]:
  """Returns the paths of those that are not hidden, sorted."""
  return [
    entry.path
    for entry in image_files.visible(root)
    if entry.name.lower().endswith(FILES) and entry.is_file()
  ]


def _with_numbers(path: str) -> list[str | int]:
  """Returns the parts of a file's name, of which every second is a number."""
  parts = re.split('([0-9]+)', os.path.basename(path))
  return [int(part) if i % 2 else part for i, part in enumerate(parts)]


def _readable_frames(path: str) -> int:
  """Returns how many frames a file says it has, less those it lacks."""
  count = int(cv2.VideoCapture(path).get(cv2.CAP_PROP_FRAME_COUNT))
  # What a file says of itself may be a few too many.
  for last in range(count - 1, max(count - 1 - _MOST_LACKING, -1), -1):
    if _frame(path, last) is not None:
      return last + 1
  return 0


def _frame(path: str, frame: int) -> np.ndarray | None:
  """Returns the pixels of a frame, RGB; None if it cannot be decoded."""
  capture = cv2.VideoCapture(path)
  capture.set(cv2.CAP_PROP_POS_FRAMES, frame)
  found, image = capture.read()
  return cv2.cvtColor(image, cv2.COLOR_BGR2RGB) if found else None


class MovingImages:
  """A made video of each image: it drifts, turns and grows, a shot each.

  The first frame is the image; the three come in random order, and each goes on
  evenly from where the one before has ended. What comes in from outside mirrors
  the image. A video follows from the name of its image.
  """

  def __init__(self, images: Source):
    """Takes the images; smaller ones than 16 pixels are enlarged."""
    self._images = images

  def __len__(self) -> int:
    return len(self._images) * _SHOTS * _FRAMES

  def __getitem__(self, index: int) -> Record:
    video, frame = divmod(index, _SHOTS * _FRAMES)
    record = self._images[video]
    image = decode.decode(record['image'], record['name'])
    pose = poses(transforms.seed_of(record['name']))[frame]
    height, width = image.shape[:2]
    scale = max(1.0, _SIDE / min(height, width))
    size = round(width * scale), round(height * scale)
    centre = (width - 1) / 2, (height - 1) / 2
    across, down, turn, grow = pose
    matrix = cv2.getRotationMatrix2D(centre, turn, scale * np.exp(grow))
    matrix[:, 2] += (
      (size[0] - width) / 2 + across * size[0],
      (size[1] - height) / 2 + down * size[1],
    )
    moved = cv2.warpAffine(image, matrix, size, borderMode=cv2.BORDER_REFLECT)
    return {'image': moved, 'name': f'{record["name"]}, frame {frame}'}


def poses(seed: int) -> np.ndarray:
  """Returns (across, down, turn, grow) of the frames of a made video.

  Shares of width and height, degrees, and the logarithm of the size.
  """
  rng = np.random.RandomState(seed)
  pose, found = np.zeros(len(_MOST)), []
  for which in rng.permutation(len(_SHOT_KINDS)):
    columns = list(_SHOT_KINDS[which])
    ends = rng.uniform(-1, 1, len(columns)) * np.array(_MOST)[columns]
    for share in np.linspace(0, 1, _FRAMES):
      pose[columns] = share * ends
      found.append(pose.copy())
  return np.array(found)
