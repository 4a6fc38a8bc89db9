"""What ran as a graph and what did not, after a run: a table, and the histogram of batches."""

from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from lockstep.launcher.text_table import aligned
from lockstep.worker.schedule.stats import GraphUse, SchedulerStats

EAGER = "EAGER"
