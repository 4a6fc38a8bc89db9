"""Ray reads its environment when it is first imported, which may be while tests are collected."""

import os

import pytest
from byte_model import write_byte_model

from lockstep.launcher.ray_environment import set_ray_defaults

set_ray_defaults(os.environ)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tiny model whose tokens are bytes."""
    return write_byte_model(tmp_path_factory.mktemp("model"))
