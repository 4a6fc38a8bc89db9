"""``lockstep`` with a fake worker of this name: python launch_driver.py SlowLoader generate ..."""

import sys

import launch_fakes

from lockstep.launcher.cli import guarded
from lockstep.launcher.cluster import start_ray_engine


def main() -> int:
    name, *argv = sys.argv[1:]

    def start(resolved, progress):
        worker_type, make_driver = getattr(launch_fakes, name), launch_fakes.FakeDriver
        return start_ray_engine(
            resolved, progress, worker_type=worker_type, make_driver=make_driver
        )

    return guarded(argv, start)


if __name__ == "__main__":
    sys.exit(main())
