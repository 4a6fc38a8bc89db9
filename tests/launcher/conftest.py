"""Ray reads its environment when it is first imported, which may be while tests are collected."""

import os

from lockstep.launcher.ray_environment import set_ray_defaults

set_ray_defaults(os.environ)
