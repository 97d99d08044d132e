"""The caches and images of tests/data, for boxes and annotations."""

from tests.data.conftest import decodings, encode, own_cache  # noqa: F401
