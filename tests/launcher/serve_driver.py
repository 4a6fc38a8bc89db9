"""``lockstep`` over a fake engine: python serve_driver.py quick|slow serve MODEL ...

Its answers repeat the prompt, a token every hundredth of a second. ``slow``: it loads for a minute.
"""

import sys
import time

from fake_engine import FakeEngine

from lockstep.launcher.cli import guarded


def endless(prompt_ids):
    return prompt_ids * 500


def load_slowly(resolved, progress):
    progress("weights", 3, 10)
    time.sleep(60)


def main() -> int:
    kind, *argv = sys.argv[1:]
    engine = FakeEngine(endless, step_s=0.01)
    return guarded(argv, {"quick": engine.start, "slow": load_slowly}[kind])


if __name__ == "__main__":
    sys.exit(main())
