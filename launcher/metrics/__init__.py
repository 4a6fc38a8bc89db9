"""What is counted of a server that runs, as Prometheus reads it."""
