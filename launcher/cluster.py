"""Starting an engine through Ray. This module does not import ray: the environment comes first."""

import logging
import os
import sys
from typing import TYPE_CHECKING

from lockstep.launcher.engine import Progress
from lockstep.launcher.rank_env import foreign_variables
from lockstep.launcher.rank_host import RankWorker
from lockstep.launcher.ray_environment import set_ray_defaults
from lockstep.launcher.resolve import Resolved
from lockstep.launcher.scheduler_host import MakeDriver

if TYPE_CHECKING:
    from lockstep.launcher.ray_engine import RayEngine

logger = logging.getLogger(__name__)


def start_ray_engine(
    resolved: Resolved,
    progress: Progress | None = None,
    *,
    worker_type: type[RankWorker] | None = None,
    make_driver: MakeDriver | None = None,
) -> "RayEngine":
    """Ranks and scheduler as Ray actors, ready to serve. The caller must call ``shutdown``.

    Uses the Ray that this process is connected to, else that of RAY_ADDRESS, else starts one that
    ends with the engine. ``worker_type`` and ``make_driver`` replace the real ones in tests.

    Raises:
        PlacementError: no room in ``placement_timeout_seconds``, or a replica on several hosts.
        StartError: Ray cannot be started or joined, or a rank failed; names it and its reason.
    """
    _warn_of_foreign_variables()
    if "ray" not in sys.modules:
        set_ray_defaults(os.environ)
    from lockstep.launcher.ray_launch import launch_engine

    return launch_engine(resolved, progress or _say_nothing, worker_type, make_driver)


def _warn_of_foreign_variables() -> None:
    foreign = foreign_variables(os.environ)
    if foreign:
        named = ", ".join(f"{name}={value}" for name, value in foreign.items())
        logger.warning("Ray places the ranks; another launcher's variables are unused: %s", named)


def _say_nothing(stage: str, done: int, total: int) -> None:
    pass
