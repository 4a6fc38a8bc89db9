"""What benchmarks share that start an engine: its load, its clocks, settings and tables."""
