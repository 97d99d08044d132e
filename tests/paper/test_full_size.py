"""The commands of full size are configs that there are."""

import pytest

from tests.conftest import ROOT
from vit_jax import flags
from vit_jax.paper import claims, full_size

# The way in which config_flags loads a config file.
pytestmark = pytest.mark.filterwarnings('ignore:the load_module:')


@pytest.mark.parametrize('study', claims.STUDIES)
def test_commands_are_configs(study, monkeypatch):
  monkeypatch.chdir(ROOT)
  for full in claims.STUDIES[study].full_size:
    config = full_size.config_of_flags(full.flags, flags.config_named)
    assert config.total.split()[1] in ('steps', 'epochs')
